"""`python -m campaigns.corruption`."""

import sys

from campaigns.corruption.campaign import main

if __name__ == "__main__":
    sys.exit(main())
