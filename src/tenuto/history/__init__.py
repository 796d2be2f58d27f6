"""What a repository's operator asks of its past: queries over checkpoints, and the catalog that answers them."""
