"""Verified reads: choosing a checkpoint, reading its leaves whole, sliced, or for another layout of ranks."""
