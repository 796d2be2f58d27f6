"""Who owns a run: claims, leases, and whether an owner is still alive."""
