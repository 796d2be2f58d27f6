"""`python -m campaigns.resume_ranks`."""

import sys

from campaigns.resume_ranks.campaign import main

if __name__ == "__main__":
    sys.exit(main())
