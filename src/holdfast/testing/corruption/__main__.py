"""`python -m holdfast.testing.corruption`."""

import sys

from holdfast.testing.corruption.campaign import main

if __name__ == "__main__":
    sys.exit(main())
