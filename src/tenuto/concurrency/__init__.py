"""Threads that wait, calls with deadlines, and work that stays in the background of training."""
