"""A disk that fails, fills up or hangs, at every call of a training and of its upkeep."""
