"""N steps, a new process, M steps: the same as N + M steps, in every bit, for many kinds of training."""
