"""`tenuto run`: starts a training, watches it, and starts it again when it dies or hangs."""
