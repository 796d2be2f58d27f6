"""Training state <-> leaves: plain values exactly typed, tensors as leaves, and the way back into existing objects."""
