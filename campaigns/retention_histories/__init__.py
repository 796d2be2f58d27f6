"""Random histories of retention, and an oracle that shares no code with it."""
