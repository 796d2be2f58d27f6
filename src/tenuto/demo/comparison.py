"""Compares two checkpoints bit for bit: every leaf's bytes, read and verified, and every plain value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tenuto.engine.read.leaf_reader import Staged, read_leaves
from tenuto.model.ids import CheckpointId
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import Json
from tenuto.record import record
from tenuto.repo.lineage import resolve
from tenuto.repo.repository import Repo


@record
class Saved:
    """One checkpoint's content: leaves by (private, path), and the plain values around them."""

    id: CheckpointId
    leaves: Mapping[tuple[bool, str], tuple[LeafSpec, bytes]]
    plain: Json

    @property
    def bytes(self) -> int:
        return sum(len(data) for _, data in self.leaves.values())


@record
class Comparison:
    """The result of a comparison. `difference`: the first one in words; None if the two are equal in every bit."""

    leaves: int
    bytes: int
    difference: str | None = None

    @property
    def equal(self) -> bool:
        return self.difference is None


def read(repo: Repo, run: str) -> Saved:
    """Reads the run's newest checkpoint completely; raises errors of the store and CorruptionError like any restore."""
    id = resolve(repo, run, "latest")
    manifest = repo.manifest(id)
    index = repo.index(manifest)
    staged = [Staged(spec.nbytes) for spec in index.specs]
    read_leaves(repo, manifest, index, list(enumerate(staged)))
    leaves = {
        (spec.private, spec.path): (spec, sink.data.tobytes()) for spec, sink in zip(index.specs, staged, strict=True)
    }
    return Saved(id, leaves, {"progress": manifest.progress, "state": manifest.tree, "private": index.private})


def compare(one: Saved, other: Saved) -> Comparison:
    """Compares two checkpoints; names the first difference in the order of the state."""
    return Comparison(len(one.leaves), one.bytes, next(_differences(one, other), None))


def _differences(one: Saved, other: Saved) -> Iterator[str]:
    for key, (spec, data) in one.leaves.items():
        matching = other.leaves.get(key)
        if matching is None:
            yield f"{spec.path}: only in {one.id}"
        elif matching[0] != spec:
            yield f"{spec.path}: {spec.dtype}{list(spec.shape)} and {matching[0].dtype}{list(matching[0].shape)}"
        elif matching[1] != data:
            first = next(place for place, (a, b) in enumerate(zip(data, matching[1], strict=True)) if a != b)
            yield f"{spec.path}: byte {first} of {len(data)} differs"
    yield from (f"{spec.path}: only in {other.id}" for key, (spec, _) in other.leaves.items() if key not in one.leaves)
    plain, other_plain = dict(_plain_values(one.plain)), dict(_plain_values(other.plain))
    for path in sorted({*plain, *other_plain}):
        if plain.get(path) != other_plain.get(path):
            yield f"{path}: {plain.get(path, 'absent')} and {other_plain.get(path, 'absent')}"


def _plain_values(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields paths and values as text: 1, 1.0 and True differ, as in a checkpoint."""
    if not isinstance(value, (Mapping, list)) or not value:
        yield path, repr(value)
        return
    for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from _plain_values(inner, f"{path}/{key}")
