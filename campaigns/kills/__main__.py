"""`python -m campaigns.kills`."""

from campaigns.kills.campaign import main

if __name__ == "__main__":
    main()
