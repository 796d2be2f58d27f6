"""One repository in several places: a home, and replicas that keep packs."""
