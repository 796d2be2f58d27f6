"""`python -m holdfast.testing.exact_resume`."""

import sys

from holdfast.testing.exact_resume.campaign import main

if __name__ == "__main__":
    sys.exit(main())
