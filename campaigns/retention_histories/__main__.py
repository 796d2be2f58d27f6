"""`python -m campaigns.retention_histories`."""

import sys

from campaigns.retention_histories.campaign import main

if __name__ == "__main__":
    sys.exit(main())
