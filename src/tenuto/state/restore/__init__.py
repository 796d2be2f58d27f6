"""Leaves and values are matched with a target, and put back into it."""
