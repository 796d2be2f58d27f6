"""The drill: proves a restore by making one, in a process that knows nothing, and by training on from it."""
