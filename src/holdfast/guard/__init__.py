"""Staying alive, and leaving honestly: signals that ask this process to leave, and what its exit status says."""
