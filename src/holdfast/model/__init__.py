"""The nouns. Frozen, one file a noun, no I/O and no clock."""
