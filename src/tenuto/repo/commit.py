"""A save's beginning and its end. `commit` is the one place where a checkpoint comes into being."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from tenuto.codec.digest import digest
from tenuto.crashpoints import crashpoint
from tenuto.errors import AlreadyExists, SaveFailed, Superseded
from tenuto.model.canonical_json import Spelled
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Index, IndexEntry, Manifest, PackEntry, Receipt
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.index import ShapeRows, encode_index
from tenuto.repo.format.manifest import encode_manifest
from tenuto.repo.format.object_names import index_file
from tenuto.repo.format.objects import UNSIGNED, signed_part
from tenuto.repo.format.small_records import Begin, encode_begin
from tenuto.repo.ownership.claim import Attempt
from tenuto.repo.repository import Repo
from tenuto.repo.unfinished import abort, close_save, free


def begin(
    attempt: Attempt,
    step: int,
    save_id: str,
    names: Sequence[str],
    *,
    bases: Sequence[CheckpointId] = (),
    newest_first: bool = False,
) -> CheckpointId:
    """Says what a save will write: `names` are file names in the checkpoint's directory. Before any other object of it.
    `bases`: the checkpoints of which it may name packs. `newest_first`: as `Begin` has it.

    First closes what earlier saves of the attempt have left: so a claim looks no further than down to the attempt's
    last checkpoint. Raises Superseded if the run was claimed since; SaveFailed if this attempt has used the step
    before. The attempt is checked again afterwards: a claimer that does not see this save is seen here. Where each call
    is a request, only that check is made: the one before spares an aborted mark where the run has been claimed.
    """
    remote = attempt.repo.store.capabilities.remote
    if not remote:
        attempt.check()
    for left in sorted(attempt.unclosed):
        close_save(attempt.repo, left, by="the save failed", owner_dead=True, report=lambda message: None)
        attempt.unclosed.discard(left)
    id = CheckpointId(attempt.run, attempt.number, step)
    name = object_names.begin_name(id)
    for file in names:
        assert object_names.is_file(file), f"{file!r} cannot be an object of a checkpoint"
    begun = Begin(id, save_id, tuple(names), attempt.parent, tuple(bases), newest_first)
    data = encode_begin(begun, attempt.repo.id, attempt.repo.signer)
    store = attempt.repo.store
    if not (remote and attempt.is_new(step)) and object_names.MANIFEST in store.children(id.directory).objects:
        raise _used(id)
    attempt.unclosed.add(id)  # where the put, or what follows it, fails with the object there
    try:
        objects.put(store, name, data, token=save_id)
    except AlreadyExists:
        attempt.unclosed.discard(id)
        raise _used(id) from None
    try:
        attempt.check()
    except Superseded:
        abort(attempt.repo, id, save_id, by="the run was claimed by another process")
        free(attempt.repo, id)
        raise
    attempt.unclosed.discard(id)
    if attempt.repo.observer is not None:
        attempt.repo.observer.begun(id, names, bases)
    crashpoint("save begun")
    return id


def commit(
    repo: Repo,
    manifest: Manifest,
    receipts: Sequence[Receipt],
    *,
    tree: Spelled | None = None,
    own: Sequence[Index] = (),
) -> CheckpointId:
    """Makes the checkpoint exist: one create-if-absent of its manifest, after everything it names is durable (I1).
    `tree`: the manifest's, where it is spelled. `own`: indexes that this process has put, and so knows.

    Raises Superseded if the save was aborted by a newer attempt; StoreError where it is not known whether the manifest
    arrived: `abort` then finds out.
    """
    _assert_durable(repo, manifest, receipts, own)
    data = encode_manifest(signed(repo, manifest, tree), repo.id, tree)
    try:
        objects.put(repo.store, manifest.id.manifest, data, token=manifest.save_id)
    except AlreadyExists:
        raise Superseded(
            f"the save of {manifest.id} cannot commit: run {manifest.id.run!r} was claimed since, and the save closed",
            subject=manifest.id.run,
            hint="stop this process, or the one that runs now",
        ) from None
    if repo.observer is not None:
        repo.observer.committed(manifest, data)
    return manifest.id


def signed(repo: Repo, manifest: Manifest, tree: Spelled | None = None) -> Manifest:
    """Returns the manifest with its code, where the repository is sealed."""
    if repo.keys is None:
        return manifest
    assert all(table.sha256 for table in manifest.tables), "digests that can be signed"
    unsigned = encode_manifest(replace(manifest, code=UNSIGNED), repo.id, tree)
    return replace(manifest, code=repo.keys.sign_object(signed_part(unsigned, UNSIGNED)))


def _assert_durable(repo: Repo, manifest: Manifest, receipts: Sequence[Receipt], own: Sequence[Index]) -> None:
    """Asserts I1: there is a receipt of this store for every index and table that the manifest names, and for every
    pack that those name."""
    known = {index_file(index.rank): index.packs for index in own} if repo.store.capabilities.remote else {}
    durable = {receipt.name: receipt.length for receipt in receipts if receipt.store == repo.store.url}
    tables = () if manifest.boxes is None else (manifest.boxes,)
    for entry in (*manifest.indexes, *tables):
        wanted = [(entry.name, entry.length)]
        if entry is not manifest.boxes and durable.get(f"{manifest.id.directory}/{entry.name}") == entry.length:
            packs = known.get(entry.name)
            # What lies in the directory of another checkpoint was durable before that one was committed.
            named = _packs_of(repo, manifest, entry) if packs is None else packs
            wanted += [(one.name, one.length) for one in named if one.at is None]
        for file, length in wanted:
            name = f"{manifest.id.directory}/{file}"
            if durable.get(name) != length:
                raise SaveFailed(
                    f"I1: {name} ({length} bytes) has no receipt from {repo.url}; the manifest is not put", subject=name
                )


def _packs_of(repo: Repo, manifest: Manifest, entry: IndexEntry) -> Sequence[PackEntry]:
    """Reads an index back from the store, as a reader of the checkpoint will. Returns the packs that it names."""
    rank = int(entry.name.removeprefix("rank-").removesuffix(".index"))
    return repo.packs(manifest, rank)


def _used(id: CheckpointId) -> SaveFailed:
    return SaveFailed(
        f"attempt {id.attempt} of run {id.run!r} has begun a save of step {id.step} before",
        subject=str(id),
        hint="the next step saves again; a new Checkpointer can save this one",
    )


# --------------------------------------------------------------------------------------------------
# Indexes put into a store. Packs themselves are put by the engine, from the image; the receipts of both go to
# `commit`.


def put_index(repo: Repo, id: CheckpointId, index: Index, rows: ShapeRows | None = None) -> tuple[Receipt, IndexEntry]:
    """Puts one rank's index, durably; the entry is for the manifest. AlreadyExists if it is there with other bytes.
    `rows`: those of the index's leaves, where they are at hand."""
    return put_object(repo, id, index_file(index.rank), encode_index(index, id, repo.id, rows), index.save_id)


def put_object(repo: Repo, id: CheckpointId, file: str, data: bytes, save_id: str) -> tuple[Receipt, IndexEntry]:
    """Puts a table of a checkpoint, durably; the entry is for the manifest. AlreadyExists as above."""
    receipt = objects.put(repo.store, f"{id.directory}/{file}", data, token=save_id)
    sha256 = "" if repo.keys is None else hashlib.sha256(data).hexdigest()
    return receipt, IndexEntry(file, len(data), digest(data), sha256)
