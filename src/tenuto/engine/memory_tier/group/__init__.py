"""The memory tier of several ranks: they keep, and restore from, the same step."""
