"""Measuring a place: what it gives raw, what a save and a restore take there, and what follows for a training."""
