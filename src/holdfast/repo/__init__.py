"""Checkpoints as objects in a store: the format, attempts and their leases, the commit, lineage, notes and refs.

`docs/design/format.md` says what every byte means and in which order objects appear and go.
"""
