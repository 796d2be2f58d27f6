"""Bytes to other bytes, and what proves them: digests of chunks."""
