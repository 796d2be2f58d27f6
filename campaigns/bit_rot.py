"""Bit rot: one byte of a checkpoint's objects is changed, and reading must say so (I5)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from campaigns.recorded_jobs import saved as saved_of
from tenuto.engine.read.choose import CheckpointLeaves, restore_checkpoint
from tenuto.errors import CorruptionError, RepositoryError
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Manifest
from tenuto.repo.repository import Repo
from tenuto.state.contract import Prepared
from tenuto.state.restore.match import match_state
from tenuto.store.local.store import LocalStore
from tenuto.testing.checker import PLACE
from tenuto.testing.expectations import Expected, Presence, Saved
from tenuto.testing.simulated_disk import BLOCK, Contents, DiskImage, SimulatedDisk


def rot(image: DiskImage, expected: Expected, source: random.Random) -> list[str]:
    """Flips a bit in each object of one checkpoint in turn; what of that passes unseen."""
    held = [id for id, presence in expected.presence.items() if presence is Presence.MUST]
    if not held:
        return []
    id = source.choice(held)
    saved = expected.saved[id]
    return [problem for path, damaged in _damaged(image, id, source) for problem in _unseen(damaged, path, id, saved)]


def _damaged(image: DiskImage, id: CheckpointId, source: random.Random) -> Iterator[tuple[str, DiskImage]]:
    directory = f"{PLACE}/{id.directory}/"
    for path, inode in image.inodes().items():
        contents = image.files.get(inode)
        if contents is None or not path.startswith(directory) or path.endswith("begin.json") or ".tmp-" in path:
            continue
        at = source.randrange(contents.size)
        yield path, DiskImage(image.directories, {**image.files, inode: _flipped(contents, at, source.randrange(8))})


def _flipped(contents: Contents, at: int, bit: int) -> Contents:
    number, within = divmod(at, BLOCK)
    block = bytearray(contents.blocks[number])
    block[within] ^= 1 << bit
    return replace(contents, blocks=(*contents.blocks[:number], bytes(block), *contents.blocks[number + 1 :]))


def _unseen(image: DiskImage, path: str, id: CheckpointId, saved: Saved) -> Iterator[str]:
    try:
        repo = Repo.open(LocalStore(PLACE, filesystem=SimulatedDisk.holding(image), create=False))
        restored = restore_checkpoint(repo, id, _prepare).state
    except (CorruptionError, RepositoryError):
        return
    if saved_of(restored) != saved:
        yield f"I5: a flipped bit of {path} was not noticed, and other values were restored"


def _prepare(manifest: Manifest, leaves: CheckpointLeaves) -> Prepared:
    return match_state(manifest.tree, leaves.private, leaves.specs)
