"""Kills a training in every phase, in rounds compared with an untouched run. `python -m campaigns.kills`."""
