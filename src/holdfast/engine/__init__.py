"""Moves state to stores and back: save, restore, and the handle of what is under way."""
