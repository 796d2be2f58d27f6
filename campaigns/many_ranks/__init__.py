"""Saves and restores of thousands of ranks in one process, through the code that each of them would run."""
