"""Looks after committed checkpoints: verify, remove, undelete, collect garbage, apply retention, replicate.

Each verb is a `plan_*` that only reads and returns printable data, and an `execute` that checks again before it acts.
"""
