"""DeepSpeed: what an engine holds as a training state, and its save_checkpoint and load_checkpoint."""
