"""What happened to the checkpoints of a run: how one differs from another."""
