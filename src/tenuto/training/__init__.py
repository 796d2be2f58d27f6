"""The Checkpointer: loops, saves, resumes, retention, signals and the exit status of one training."""
