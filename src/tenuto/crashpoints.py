"""Named crash points: the dangerous lines of the protocol, where a test may end the process.

In production `crashpoint(name)` is one truth test. A test arms a name with a callable (usually one that kills the
process), runs the protocol, and checks what is left. Only names registered here can be reached or armed, so the list is
complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

NAMES: Final[frozenset[str]] = frozenset(
    {
        "attempt claimed",
        "save begun",
        "image captured",
        "image being copied beside training",
        "memory image captured, not sealed",
        "memory image sealed",
        "memory image found, not adopted",
        "memory image adopted, not yet claimed",
        "what is in memory told, choice not yet heard",
        "memory image looked into, not yet voted for",
        "claimed, memory image not yet resealed",
        "image to be flushed is whole, run not yet claimed",
        "flushed pack durable, index not yet",
        "flushed image written, not committed",
        "flushed image committed, still in memory",
        "images to be gathered are open, run not yet claimed",
        "gathered state committed, still in memory",
        "pack durable, index not yet",
        "packs and indexes durable, manifest not yet",
        "manifest durable, not yet reported",
        "migrated checkpoints durable, none visible",
        "a migrated checkpoint is visible",
        "copies put, none visible",
        "a copy is visible",
        "emergency checkpoint taken over, still in its place",
        "repacked checkpoints durable, none visible",
        "a repacked checkpoint is visible",
        "repacked checkpoints visible, originals still there",
        "ranks met, repository not yet opened",
        "repository opened, nothing chosen yet",
        "packs copied, checkpoint not looked for again",
        "part restored, not yet voted for",
        "restore voted for, run not yet claimed",
        "claim heard, nothing saved yet",
        "structure told, plan not yet heard",
        "ready told, not yet begun",
        "begun, nothing written",
        "parts put and told, manifest not yet",
        "manifest durable, not yet announced",
        "commit heard, not yet reported",
        "unfinished save marked aborted, objects still there",
        "tombstone put, manifest still there",
        "copy in trash, manifest still there",
        "manifest removed, packs still there",
        "packs removed, notes still there",
        "manifest put back from trash, not yet checked",
        "objects swept, copy in trash still there",
        "place has the tables of a checkpoint, not its data files",
        "place has the data files of a checkpoint, not its manifest",
        "place has a checkpoint",
        "place has a base of a checkpoint in its trash, not its data files",
        "primary has the claims of another tier, not its checkpoints",
        "primary has the tables of another tier's checkpoint, not its manifest",
        "damaged copy removed, not yet written anew",
        "repaired object staged, damaged one still there",
        "damaged object removed, repaired one not yet in its place",
        "repaired object in its place, staged one still there",
        "repaired manifest in the trash, damaged one still there",
        "damaged manifest removed, repaired one not yet in its place",
        "damaged manifest removed from another place, repaired one not yet there",
    }
)

_armed: dict[str, Callable[[], None]] = {}


def crashpoint(name: str) -> None:
    """Runs the action that a test has armed for this name, if any."""
    if _armed:
        if name not in NAMES:
            raise KeyError(f"crash point {name!r} is not registered")
        action = _armed.get(name)
        if action is not None:
            action()


@contextmanager
def armed(name: str, action: Callable[[], None]) -> Iterator[None]:
    """Calls `action` whenever `name` is reached within the block."""
    if name not in NAMES:
        raise KeyError(f"crash point {name!r} is not registered")
    _armed[name] = action
    try:
        yield
    finally:
        del _armed[name]
