"""Positions in the data of torch: samplers and loaders."""
