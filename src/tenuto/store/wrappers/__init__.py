"""Stores over other stores: retries, and one content put into several."""
