"""One module for each command, with a function of the same name."""
