"""Objects and places: the contract of a store, its backends, and the wrappers that add to any of them."""
