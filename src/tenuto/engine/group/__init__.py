"""How the ranks of a job save and restore together."""
