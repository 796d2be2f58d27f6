"""Signs checkpoints, and checks who has signed them. A signature is a note of kind `signed`."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from tenuto.concurrency.worker_threads import parallel_for
from tenuto.engine.read.chunk_reader import threads_for
from tenuto.errors import CorruptionError, ObjectNotFound
from tenuto.maintenance.findings import Finding
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Json, Note
from tenuto.repo.notes import add_note, notes
from tenuto.repo.repository import Repo
from tenuto.seal.signing import SignedObject, Signer, is_signed, statement

SIGNED: Final = "signed"
_STRIDE: Final = 8 << 20


def sign(repo: Repo, id: CheckpointId, signer: Signer) -> Note:
    """Reads every byte of a checkpoint and signs what was read: verify it first, a damaged one is signed as it is.

    Raises CheckpointNotFound; CorruptionError where an object is missing, or manifest or index cannot be read.
    """
    repo.require_key()
    names = _names(repo, id)
    digests = _digests(repo, names)
    absent = [name for name in names if name not in digests]
    if absent:
        raise CorruptionError(f"{absent[0]} is missing, which {id} consists of", subject=absent[0], object=absent[0])
    objects = [digests[name] for name in names]
    body: dict[str, Json] = {
        "objects": [[one.name, one.length, one.sha256] for one in objects],
        "public": signer.public,
        "signature": signer.sign(statement(repo.id, id.directory, objects)),
    }
    return add_note(repo, id, SIGNED, body)


def _names(repo: Repo, id: CheckpointId) -> list[str]:
    manifest = repo.manifest(id)
    tables = [f"{id.directory}/{entry.name}" for entry in manifest.tables]
    packs = [pack.object_name(id) for rank in range(len(manifest.indexes)) for pack in repo.packs(manifest, rank)]
    return sorted({id.manifest, *tables, *packs})


def signatures(repo: Repo, id: CheckpointId) -> Iterator[tuple[str, list[SignedObject]]]:
    """Yields the public key and the objects of each signature of a checkpoint that is valid. Whether the objects are
    still what was signed, `check_signed` finds."""
    for note in notes(repo, id):
        public, signature = str(note.body.get("public")), str(note.body.get("signature"))
        objects = _signed_objects(note.body.get("objects")) if note.kind == SIGNED else None
        if objects is not None and is_signed(public, signature, statement(repo.id, id.directory, objects)):
            yield public, objects


def _signed_objects(rows: Json) -> list[SignedObject] | None:
    found = []
    for row in rows if isinstance(rows, list) else [None]:
        if not isinstance(row, list) or list(map(type, row)) != [str, int, str]:
            return None
        found.append(SignedObject(*row))
    return found


def check_signed(repo: Repo, id: CheckpointId, trusted: Collection[str]) -> list[Finding]:
    """Returns what keeps a checkpoint from being one that a holder of a trusted key has signed; reads every byte of it.
    `trusted`: public keys, as hexadecimal digits. Needs no key of a sealed repository."""
    found: list[Finding] = []
    for public, objects in signatures(repo, id):
        if public not in trusted:
            continue
        wrong = [
            Finding(id, "error", f"is not what was signed by {public[:16]}", object=name, harms_restore=False)
            for name in _differing(repo, id, objects)
        ]
        if not wrong:
            return []
        found = found or wrong
    return found or [Finding(id, "error", "is not signed by any of the trusted keys", harms_restore=False)]


def _differing(repo: Repo, id: CheckpointId, objects: Sequence[SignedObject]) -> list[str]:
    now = _digests(repo, [one.name for one in objects])
    listed = [one.name for one in objects]
    absent = [] if id.manifest in listed else [id.manifest]
    return absent + [one.name for one in objects if now.get(one.name) != one]


def _digests(repo: Repo, names: Sequence[str]) -> dict[str, SignedObject]:
    """Returns what is under each name now; nothing for one that is not there."""
    found: dict[str, SignedObject] = {}

    def read(name: str) -> None:
        try:
            with repo.store.open(name) as reader:
                digest, length = hashlib.sha256(), reader.length
                buffer = memoryview(bytearray(min(length, _STRIDE)))
                for start in range(0, length, _STRIDE):
                    part = buffer[: min(_STRIDE, length - start)]
                    reader.read_into(start, part)
                    digest.update(part)
        except (ObjectNotFound, CorruptionError):
            return
        found[name] = SignedObject(name, length, digest.hexdigest())

    parallel_for(read, names, threads_for(repo).read)
    return found
