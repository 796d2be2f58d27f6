"""Positions in training: the data, the random state, and how many ranks shared them."""
