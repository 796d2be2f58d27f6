"""Optimizers as leaves and values, and the way back."""
