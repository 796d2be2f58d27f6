"""Sealing: keys and their slots, encryption of chunks, authentication, signatures. Nothing here knows a
store."""
