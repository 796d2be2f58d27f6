"""Compares two checkpoints, or one with a file of weights."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from tenuto.engine.read.opened import open_checkpoint
from tenuto.errors import UsageError, typed
from tenuto.events import Emitter
from tenuto.formats.contract import Reader, Tensor
from tenuto.history.diff import Diff, LeafSource, Side, compare, side_of
from tenuto.model.ids import CheckpointId
from tenuto.repo.keys import unlock
from tenuto.repo.lineage import resolve
from tenuto.repo.repository import Repo
from tenuto.sharding.slices import Block
from tenuto.state.contract import Buffer
from tenuto.store.contract import Where
from tenuto.store.registry import open_store, redirected

Progress = Callable[[int, int], None]


class _FileTensor(NamedTuple):
    tensor: Tensor

    @property
    def dtype(self) -> str:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def read(self, out: Buffer, block: Block) -> None:
        self.tensor.read_into(out, block.start)

    def digests(self) -> tuple[Any, ...] | None:
        return None


def diff(
    repo: Repo,
    first: int | str | CheckpointId,
    second: int | str | CheckpointId,
    *,
    run: str = "main",
    where: Where | None = None,
    entry: str | None = None,
    progress: Progress | None = None,
) -> Diff:
    """Does what `Repository.diff` does. `run`: of both, unless they are whole identities."""
    if repo.keys is None:
        unlock(repo)
    with ExitStack() as stack:
        opened = stack.enter_context(open_one(repo, resolve(repo, run, first)))
        if isinstance(where, str | os.PathLike) and is_file_of_weights(os.fspath(where)):
            from tenuto.formats.safetensors import read

            reader = stack.enter_context(read(Path(where)))
            side = side_of(opened, entry)
            return compare(_named_as(side, reader), _file_side(reader), progress=progress)
        other = repo
        if where is not None:
            other = Repo.open(open_store(redirected(where)))
            unlock(other)
        against = stack.enter_context(open_one(other, resolve(other, run, second)))
        return compare(_placed(side_of(opened, entry), repo, where), side_of(against, entry), progress=progress)


def open_one(repo: Repo, id: CheckpointId) -> Any:
    return open_checkpoint(repo, id, rank=None, emitter=Emitter())


def is_file_of_weights(path: str) -> bool:
    """Returns whether this names a safetensors file, or the index of several."""
    return path.endswith((".safetensors", ".safetensors.index.json"))


def _placed(side: Side, repo: Repo, where: Where | None) -> Side:
    return side if where is None else Side(f"{side.name} at {repo.url}", *_rest(side))


def _rest(side: Side) -> tuple[Any, ...]:
    return side.leaves, side.values, side.environment, side.certificate


def _file_side(reader: Reader) -> Side:
    leaves: dict[str, LeafSource] = {name: _FileTensor(tensor) for name, tensor in reader.tree.items()}
    return Side(str(reader.path), leaves, {}, {}, {}, plain=False)


def _named_as(side: Side, reader: Reader) -> Side:
    """Returns the side with the names that its leaves have in a file of weights: those below the entry of the state
    that has most of the file's names. Raises UsageError where none has any."""
    names = reader.tree.keys()

    named: Counter[str] = Counter()
    for path in side.leaves:
        cuts = (0, *(at + 1 for at, char in enumerate(path) if char == "/"))
        named.update(path[:cut] for cut in cuts if path[cut:] in names)
    if not named:
        raise UsageError(
            f"{side.name} and {reader.path} have no name in common",
            subject=str(reader.path),
            hint=f"--entry names the entry of the weights; {typed('tenuto', 'show', '--leaves')} lists what there is",
        )
    best = max(sorted(named), key=named.__getitem__)
    leaves = {path.removeprefix(best): leaf for path, leaf in side.leaves.items() if path.startswith(best)}
    return Side(side.name + (f", {best[:-1]}" if best else ""), leaves, {}, {}, {}, plain=False)
