"""Signals delivered at every line of the training thread's and the writer's way."""
