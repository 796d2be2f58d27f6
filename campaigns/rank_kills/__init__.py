"""Ranks of a job as forked processes, killed and stopped: who raises what, and what the job comes to in the end."""
