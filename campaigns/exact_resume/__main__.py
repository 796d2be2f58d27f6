"""`python -m campaigns.exact_resume`."""

import sys

from campaigns.exact_resume.campaign import main

if __name__ == "__main__":
    sys.exit(main())
