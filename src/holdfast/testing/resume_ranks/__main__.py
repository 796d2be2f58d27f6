"""`python -m holdfast.testing.resume_ranks`."""

import sys

from holdfast.testing.resume_ranks.campaign import main

if __name__ == "__main__":
    sys.exit(main())
