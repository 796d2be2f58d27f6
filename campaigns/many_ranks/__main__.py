"""`python -m campaigns.many_ranks`."""

import sys

from campaigns.many_ranks.campaign import main

if __name__ == "__main__":
    sys.exit(main())
