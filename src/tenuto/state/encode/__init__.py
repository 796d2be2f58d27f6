"""A state becomes leaves and a tree of plain values."""
