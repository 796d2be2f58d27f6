"""Digests of chunks."""
