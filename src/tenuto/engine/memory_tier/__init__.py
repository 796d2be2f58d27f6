"""States sealed in shared memory, which survive the process, and restores from them."""
