"""Pairs of layouts drawn at random: saved in one, restored in the other, compared bit for bit with what was meant."""
