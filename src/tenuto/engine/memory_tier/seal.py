"""The content of a seal: whose state an image in shared memory is, of which step, and its index and manifest."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tenuto.concurrency.process import this_process
from tenuto.engine.staging.slots import MAX_PAYLOAD
from tenuto.errors import CorruptionError, FormatTooNew, Tampered
from tenuto.model import canonical_json
from tenuto.model.canonical_json import MAX_INTEGER
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Json
from tenuto.record import record
from tenuto.repo.format import objects
from tenuto.repo.format.objects import Fields, checkpoint_json
from tenuto.repo.repository import Repo, now_text

if TYPE_CHECKING:
    from tenuto.seal.keys import RepositoryKeys

KIND: Final = "memory"
_MAX_SEQUENCE: Final = MAX_INTEGER >> 1
"""Far more than there are steps, and others follow whatever a file says."""
_MAX_WHERE: Final = 1500
"""Bytes that a place's name may take as JSON: what is longer is left out, for a block of the seal has 4096."""


@record
class SealedObject:
    """An index or a manifest as a seal names it."""

    length: int
    digest: bytes


@record
class SealHolder:
    """The owner of an image: the attempt that completed its step, and the random id of that attempt's claim."""

    attempt: int
    claim: str


@record
class Seal:
    """One seal. `id`: the checkpoint that its manifest describes; `holder`: whose it is now, a later attempt where one
    has gone on from it. `image`, bytes: where the index begins, which the manifest follows.

    ranks: how many have sealed theirs of this step, `rank` among them; what ranks have sealed of one state has one
    `save_id`. sequence: higher is newer, over all slots of a rank. boot, uid: of the machine and the user that it is
    meant for. sealed_us, saved_us: this boot's monotonic clock, when it was sealed, and when a save to the store was
    last begun. created: for the eye. where: its repository; place: that directory itself, as `place_of` has it.
    """

    repository: str
    id: CheckpointId
    save_id: str
    rank: int
    holder: SealHolder
    sequence: int
    image: int
    index: SealedObject
    manifest: SealedObject
    boot: str
    uid: int
    sealed_us: int
    saved_us: int
    created: str
    where: str
    ranks: int = 1
    place: str = ""
    keyed: str = ""
    """Where its repository has keys, the code of its save id by them: what is written of it is sealed, and by them."""
    code: str = ""
    """And that of all bytes that are sealed, as `sign_content` makes it."""
    signed: str = ""
    """And that of all else that the seal says, whose it is now among it."""

    @property
    def length(self) -> int:
        """Bytes of everything that is sealed."""
        return self.image + self.index.length + self.manifest.length

    @property
    def age_s(self) -> float:
        """Seconds since it was sealed, within the boot that sealed it."""
        return max(time.monotonic_ns() // 1000 - self.sealed_us, 0) / 1e6

    @property
    def identity(self) -> bytes:
        """What `code` binds the bytes to."""
        parts: list[Json] = [_part_json(self.index), _part_json(self.manifest)]
        told: list[Json] = ["tenuto image 1", self.repository, self.save_id, self.rank, self.ranks, self.image]
        return canonical_json.dumps([*told, checkpoint_json(self.id), *parts])

    def held_by(self, holder: SealHolder, keys: RepositoryKeys | None) -> Seal:
        """Returns the seal of the same image as `holder`'s. keys: those of its repository."""
        return replace(self, holder=holder, sequence=self.sequence + 1)._signed_by(keys)

    def check(self, keys: RepositoryKeys, name: str) -> None:
        """Raises Tampered where no holder of the keys has put this into the seal of the slot called `name`; KeyMissing
        as `RepositoryKeys.key`."""
        if not self.signed:
            raise Tampered(
                f"{name} has no code by a key of its repository: it was made before there was one, or by who has none",
                subject=name,
                object=name,
            )
        keys.check_object(self._statement(), self.signed, name)

    def _signed_by(self, keys: RepositoryKeys | None) -> Seal:
        return self if keys is None else replace(self, signed=keys.sign_object(self._statement()))

    def _statement(self) -> bytes:
        return canonical_json.dumps({name: one for name, one in _body(self).items() if name != "signed"})


def new_seal(
    repo: Repo,
    id: CheckpointId,
    save_id: str,
    holder: SealHolder,
    *,
    rank: int,
    sequence: int,
    image: int,
    index: SealedObject,
    manifest: SealedObject,
    saved_s: float,
    content: Sequence[bytes | memoryview],
    ranks: int = 1,
) -> Seal:
    """Returns a seal of now, by this process. content: image, index and manifest."""
    seal = Seal(
        repository=repo.id,
        id=id,
        save_id=save_id,
        rank=rank,
        holder=holder,
        sequence=sequence,
        image=image,
        index=index,
        manifest=manifest,
        boot=this_process().boot,
        uid=os.geteuid(),
        sealed_us=time.monotonic_ns() // 1000,
        saved_us=max(int(saved_s * 1e6), 0),
        created=now_text(),
        where=repo.url if len(json.dumps(repo.url)) <= _MAX_WHERE and repo.url.isascii() else "",
        ranks=ranks,
        place=place_of(repo.url),
        keyed="" if repo.keys is None else repo.keys.sign_object(save_id.encode()),
    )
    if repo.keys is None:
        return seal
    from tenuto.seal.content_code import sign_content

    return replace(seal, code=sign_content(repo.keys, seal.identity, content))._signed_by(repo.keys)


def place_of(url: str) -> str:
    """Returns which directory a repository is, whatever path leads there: its device and inode. Empty where it is none
    of this machine's."""
    try:
        found = os.stat(url)
    except (OSError, ValueError):
        return ""
    return f"{found.st_dev}:{found.st_ino}"


def encode_seal(footer: Seal, name: str) -> bytes:
    """Returns the payload of a seal of the slot called `name`."""
    data = objects.encode(KIND, name, _body(footer), footer.repository)
    assert len(data) <= MAX_PAYLOAD
    return data


def _body(footer: Seal) -> dict[str, Json]:
    return {
        "boot": footer.boot,
        "checkpoint": checkpoint_json(footer.id),
        "created": footer.created,
        "holder": {"attempt": footer.holder.attempt, "claim": footer.holder.claim},
        "image": footer.image,
        "index": _part_json(footer.index),
        "manifest": _part_json(footer.manifest),
        "rank": footer.rank,
        "save_id": footer.save_id,
        "saved_us": footer.saved_us,
        "sealed_us": footer.sealed_us,
        "sequence": footer.sequence,
        "uid": footer.uid,
        "where": footer.where,
        **({} if footer.ranks == 1 else {"ranks": footer.ranks}),
        **({"place": footer.place} if footer.place else {}),
        **({"keyed": footer.keyed} if footer.keyed else {}),
        **({"code": footer.code} if footer.code else {}),
        **({"signed": footer.signed} if footer.signed else {}),
    }


def decode_seal(data: bytes, name: str) -> Seal:
    """Reads a payload. CorruptionError if it is damaged, a copy of another slot's, or no valid seal; FormatTooNew."""
    found = objects.decode(KIND, name, data, None)
    id = found.checkpoint("checkpoint")
    if id is None:
        raise found.refuse("names no checkpoint")
    holder = found.inner(found.mapping("holder"), "the holder")
    ranks = found.whole("ranks", minimum=2) if "ranks" in found.values else 1
    return Seal(
        repository=found.text("repository"),
        id=id,
        save_id=found.hex("save_id", 32),
        rank=found.whole("rank", maximum=ranks - 1),
        holder=SealHolder(holder.whole("attempt", minimum=1), holder.hex("claim", 32)),
        sequence=found.whole("sequence", minimum=1, maximum=_MAX_SEQUENCE),
        image=found.whole("image", maximum=MAX_INTEGER),
        index=_part(found, "index"),
        manifest=_part(found, "manifest"),
        boot=found.text("boot"),
        uid=found.whole("uid"),
        sealed_us=found.whole("sealed_us", maximum=MAX_INTEGER),
        saved_us=found.whole("saved_us", maximum=MAX_INTEGER),
        created=found.text("created"),
        where=found.text("where"),
        ranks=ranks,
        place=found.text("place", limit=100) if "place" in found.values else "",
        keyed=found.text("keyed", limit=100) if "keyed" in found.values else "",
        code=found.text("code", limit=120) if "code" in found.values else "",
        signed=found.text("signed", limit=100) if "signed" in found.values else "",
    )


def newest(seals: Sequence[tuple[int, bytes]], name: str) -> tuple[int, Seal] | None:
    """Returns number and content of the newer seal of the slot called `name`; None where neither can be read."""
    found: list[tuple[int, Seal]] = []
    for number, payload in seals:
        try:
            found.append((number, decode_seal(payload, name)))
        except (CorruptionError, FormatTooNew):
            continue
    return max(found, key=lambda one: one[1].sequence, default=None)


def _part_json(part: SealedObject) -> Json:
    return {"digest": part.digest.hex(), "length": part.length}


def _part(found: Fields, key: str) -> SealedObject:
    inner = found.inner(found.mapping(key), key)
    return SealedObject(inner.whole("length"), bytes.fromhex(inner.hex("digest", 32)))
