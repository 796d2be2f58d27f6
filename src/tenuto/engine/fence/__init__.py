"""Captures that are copied in the background and fenced off from the next update of the optimizer."""
