"""`tenuto bench`: measures saves and restores in one place, and the raw speed of its disk."""
