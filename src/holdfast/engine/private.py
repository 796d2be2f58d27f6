"""What one rank alone has saved, read by another: where a run is gone on with by another number of ranks."""

from __future__ import annotations

from typing import Any

from holdfast.engine.parts import Parts
from holdfast.events import Emitter
from holdfast.model.checkpoint import Manifest
from holdfast.repo.repository import Repo
from holdfast.state.prepare import prepare


def private_entry(repo: Repo, manifest: Manifest, rank: int, name: str, emitter: Emitter) -> dict[str, Any]:
    """One entry of the private tree of a rank, as new values; empty where it has none. CorruptionError where what holds
    it is damaged."""
    parts = Parts(repo, manifest, rank, emitter)
    if parts.whole.private is None:
        return {}
    found: dict[str, dict[str, Any]] = {name: {}}
    prepared = prepare(manifest.tree, parts.whole.private, parts.whole.specs, {}, private_into=found)
    parts.read(prepared)
    prepared.apply()
    return found[name]
