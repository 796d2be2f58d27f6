"""Saving and restoring one state together: what the ranks of a job tell each other, and in which order."""
