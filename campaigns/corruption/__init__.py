"""Corruption: faults over every class of byte of every object, and what reading and verify make of them."""
