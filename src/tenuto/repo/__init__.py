"""Checkpoints as objects in a store: commit, lineage, ownership, notes, refs, replicas.

`docs/design/format.md` says what every byte means and in which order objects appear and go.
"""
