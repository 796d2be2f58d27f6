"""Looks after committed checkpoints: verify, remove, undelete, collect garbage, apply retention, replicate.

Each verb is a `plan_*` that only reads and returns printable data, and an `execute` that looks again before it acts.
"""
