"""Stores over other stores: retries, one content put into several, parts dealt out to several, a local cache, a limit
on bytes per second."""
