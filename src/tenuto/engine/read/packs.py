"""Opens packs for reading, and turns to another copy where one is damaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from tenuto.codec.digest import digest
from tenuto.errors import CorruptionError, ObjectNotFound, StoreError, typed
from tenuto.model.ids import CheckpointId
from tenuto.model.records import PackEntry
from tenuto.repo.replicated.places import describe_missing_pack, mark_damaged
from tenuto.repo.repository import Repo
from tenuto.state.contract import Buffer
from tenuto.store.contract import Reader, is_unreadable

Result = TypeVar("Result")


@dataclass(slots=True)
class OpenPack:
    """`name`: the object's full name. `view`: the whole object where it lies in memory, read-only."""

    name: str
    reader: Reader
    view: Buffer | None

    def read_into(self, position: int, target: Buffer) -> None:
        """Fills `target` with the bytes from `position` on: copied from memory, or read."""
        if self.view is None:
            self.reader.read_into(position, target.data)
        else:
            # A ufunc copies by wide registers and without the interpreter's lock: faster than a slice assignment.
            np.positive(self.view[position : position + len(target)], out=target)

    def close(self) -> None:
        self.view = None
        self.reader.close()


def open_pack(repo: Repo, id: CheckpointId, entry: PackEntry, *, header: bool) -> OpenPack:
    """Opens a pack and checks its length, and with `header` its header block, against the index. Raises
    CorruptionError."""
    name = entry.object_name(id)
    try:
        reader = repo.store.open(name)
    except ObjectNotFound as error:
        raise missing(repo, name) from error
    try:
        if reader.length != entry.length:
            raise _refused(repo, name, f"{name} is {reader.length} bytes long; {entry.length} were saved", name)
        if header:
            block = np.empty(entry.header_length, np.uint8)
            try:
                reader.read_into(0, block.data)
            except ObjectNotFound as error:
                raise missing(repo, name) from error
            if digest(block.data) != entry.header_digest:
                raise _refused(repo, name, f"the header of {name} is damaged", name)
        whole = reader.view()
    except BaseException:
        reader.close()
        raise
    return OpenPack(name, reader, np.frombuffer(whole, np.uint8) if whole is not None else None)


def missing(repo: Repo, name: str) -> CorruptionError:
    """Returns the error for a pack that is not there. A restore finds out whether its checkpoint was removed too."""
    why = describe_missing_pack(repo.store) or "is missing: damaged, or the checkpoint was removed meanwhile"
    return _refused(repo, name, f"{name} {why}", name)


def damaged(repo: Repo, path: str, pack: str, nbytes: int, offset: int) -> CorruptionError:
    """Returns the error for a damaged chunk of leaf `path` (I5): `nbytes` of `pack` from `offset` on."""
    what = f"{nbytes} bytes from offset {offset}"
    error = _refused(repo, path, f"{path} is damaged: {pack}, {what}, are not what was saved", pack)
    error.hint = (
        f"{error.hint} names all that is; {typed('tenuto', 'repair', repo.url)} puts back what it can; "
        "tenuto.load(…, exclude=…) restores the rest"
    )
    return error


def from_any_copy(repo: Repo, read: Callable[[], Result]) -> Result:
    """Returns what `read` returns. Where a pack turns out to be damaged and has another copy, reads again from that."""
    while True:
        try:
            return read()
        except (CorruptionError, StoreError) as error:
            if replace_copy(repo, error) is None:
                raise


def replace_copy(repo: Repo, error: CorruptionError | StoreError) -> str | None:
    """Returns the pack of which `error` reports a damaged copy, if there is another copy, which is read from now on."""
    name = error.object or error.subject if isinstance(error, CorruptionError) else error.subject
    damage = isinstance(error, CorruptionError) or is_unreadable(error)
    return name if name is not None and damage and mark_damaged(repo.store, name) else None


def _refused(repo: Repo, subject: str, message: str, name: str) -> CorruptionError:
    return CorruptionError(message, subject=subject, hint=typed("tenuto", "verify", repo.url), object=name)
