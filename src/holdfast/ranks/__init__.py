"""Agreement between the processes of one job. So far there is one process, and more than one is refused by name."""
