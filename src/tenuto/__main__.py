"""`python -m tenuto`: the command line, where the script `tenuto` is not on the path."""

from tenuto.cli import main

if __name__ == "__main__":
    main()
