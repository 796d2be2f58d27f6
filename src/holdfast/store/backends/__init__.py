"""Places that hold objects. Reached through `holdfast.store.registry` alone."""
