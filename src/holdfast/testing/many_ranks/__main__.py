"""`python -m holdfast.testing.many_ranks`."""

import sys

from holdfast.testing.many_ranks.campaign import main

if __name__ == "__main__":
    sys.exit(main())
