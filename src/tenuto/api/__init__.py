"""One-off saves and loads, and repositories and checkpoints opened for looking at."""
