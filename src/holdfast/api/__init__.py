"""What a user holds: the Checkpointer of a training loop, one-off save and load, and the operator's Repository."""
