"""The key-value stores that ranks may share."""
