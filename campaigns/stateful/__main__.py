"""`python -m campaigns.stateful`."""

import sys

from campaigns.stateful.campaign import main

if __name__ == "__main__":
    sys.exit(main())
