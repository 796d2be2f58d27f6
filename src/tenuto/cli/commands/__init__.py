"""One module for each command, which has a function of the same name."""
