"""`python -m holdfast.testing.stateful`."""

import sys

from holdfast.testing.stateful.campaign import main

if __name__ == "__main__":
    sys.exit(main())
