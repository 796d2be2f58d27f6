"""Random histories of the whole product, and a small model of what must be true of them."""
