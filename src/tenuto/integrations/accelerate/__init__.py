"""accelerate: what an Accelerator has prepared as a training state, and its save_state and load_state."""
