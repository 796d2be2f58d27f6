"""`python -m holdfast.testing.retention_histories`."""

import sys

from holdfast.testing.retention_histories.campaign import main

if __name__ == "__main__":
    sys.exit(main())
