"""`python -m campaigns.faulty_disk`."""

import sys

from campaigns.faulty_disk.campaign import main

if __name__ == "__main__":
    sys.exit(main())
