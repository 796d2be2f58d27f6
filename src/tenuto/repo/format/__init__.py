"""The bytes of each object of a repository, written and strictly read."""
