"""The save pipeline, from a flattened state to a committed checkpoint."""
