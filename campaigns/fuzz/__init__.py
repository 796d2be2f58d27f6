"""Fuzzing: every reader of bytes is given bytes that nobody vouches for. `python -m campaigns.fuzz`."""
