"""Saves and restores: staging, fences, reading, the save pipeline, groups of ranks, and the memory tier."""
