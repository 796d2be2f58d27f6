"""Sealing: keys and their slots, encryption of chunks and tables, authentication, signatures. Nothing here knows a
store."""
