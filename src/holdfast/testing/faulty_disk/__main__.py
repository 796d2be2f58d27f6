"""`python -m holdfast.testing.faulty_disk`."""

import sys

from holdfast.testing.faulty_disk.campaign import main

if __name__ == "__main__":
    sys.exit(main())
