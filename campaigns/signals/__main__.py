"""`python -m campaigns.signals`."""

import sys

from campaigns.signals.campaign import main

if __name__ == "__main__":
    sys.exit(main())
