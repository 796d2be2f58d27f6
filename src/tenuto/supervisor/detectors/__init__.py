"""Detectors: what is read of the machine beside a training, and what they find in it before the training ends of it."""
