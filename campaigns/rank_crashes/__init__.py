"""Crash states of jobs of several ranks: interleavings drawn from a seed, on one machine or several nodes."""
