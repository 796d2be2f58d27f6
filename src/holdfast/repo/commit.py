"""A save's beginning and its end. `commit` is the one place where a checkpoint comes into being."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.crashpoints import crashpoint
from holdfast.errors import AlreadyExists, SaveFailed, Superseded
from holdfast.model.canonical import Spelled
from holdfast.model.checkpoint import IndexEntry, Manifest, Receipt
from holdfast.model.names import CheckpointId
from holdfast.repo import layout, objects
from holdfast.repo.attempts import Attempt
from holdfast.repo.manifest import encode_manifest
from holdfast.repo.records import Begin, encode_begin
from holdfast.repo.repository import Repo
from holdfast.repo.unfinished import abort, free

__all__ = ["abort", "begin", "commit", "free"]


def begin(attempt: Attempt, step: int, save_id: str, names: Sequence[str]) -> CheckpointId:
    """Says what a save will write: `names` are file names in the checkpoint's directory. Before any other object of it.

    Raises Superseded if the run was claimed since; SaveFailed if this attempt has used the step before. The attempt is
    checked again afterwards: a claimer that does not see this save is seen here.
    """
    attempt.check()
    id = CheckpointId(attempt.run, attempt.number, step)
    name = layout.begin_name(id)
    for file in names:
        assert layout.is_file(file), f"{file!r} cannot be an object of a checkpoint"
    data = encode_begin(Begin(id, save_id, tuple(names), attempt.parent))
    store = attempt.repo.store
    if layout.MANIFEST in store.children(id.directory).objects:
        raise _used(id)
    try:
        objects.put(store, name, data, token=save_id)
    except AlreadyExists:
        raise _used(id) from None
    try:
        attempt.check()
    except Superseded:
        abort(attempt.repo, id, save_id, by="the run was claimed by another process")
        free(attempt.repo, id)
        raise
    crashpoint("save begun")
    return id


def commit(repo: Repo, manifest: Manifest, receipts: Sequence[Receipt], *, tree: Spelled | None = None) -> CheckpointId:
    """Makes the checkpoint exist: one create-if-absent of its manifest, after everything it names is durable (I1).
    `tree`: the manifest's, where it is spelled.

    Raises Superseded if the save was aborted by a newer attempt; StoreError where it is not known whether the manifest
    arrived: `abort` then finds out.
    """
    _assert_durable(repo, manifest, receipts)
    try:
        objects.put(repo.store, manifest.id.manifest, encode_manifest(manifest, tree), token=manifest.save_id)
    except AlreadyExists:
        raise Superseded(
            f"the save of {manifest.id} cannot commit: run {manifest.id.run!r} was claimed since, and the save closed",
            subject=manifest.id.run,
            hint="stop this process, or the one that runs now",
        ) from None
    return manifest.id


def _assert_durable(repo: Repo, manifest: Manifest, receipts: Sequence[Receipt]) -> None:
    """I1: for every index and table that the manifest names, and every pack that those name, there is a receipt of this
    store."""
    durable = {receipt.name: receipt.length for receipt in receipts if receipt.store == repo.store.url}
    tables = () if manifest.boxes is None else (manifest.boxes,)
    for entry in (*manifest.indexes, *tables):
        wanted = [(entry.name, entry.length)]
        if entry is not manifest.boxes and durable.get(f"{manifest.id.directory}/{entry.name}") == entry.length:
            wanted += _packs_of(repo, manifest, entry)
        for file, length in wanted:
            name = f"{manifest.id.directory}/{file}"
            if durable.get(name) != length:
                raise SaveFailed(
                    f"I1: {name} ({length} bytes) has no receipt from {repo.url}; the manifest is not put", subject=name
                )


def _packs_of(repo: Repo, manifest: Manifest, entry: IndexEntry) -> list[tuple[str, int]]:
    """The packs that an index names, read back from the store: as a reader of the checkpoint will find them."""
    rank = int(entry.name.removeprefix("rank-").removesuffix(".index"))
    return [(pack.name, pack.length) for pack in repo.packs(manifest, rank)]


def _used(id: CheckpointId) -> SaveFailed:
    return SaveFailed(
        f"attempt {id.attempt} of run {id.run!r} has begun a save of step {id.step} before",
        subject=str(id),
        hint="the next step saves again; a new Checkpointer can save this one",
    )
