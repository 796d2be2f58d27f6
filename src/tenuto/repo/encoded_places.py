"""Places that have a checkpoint in an encoding of their own: the same run, attempt, step, save id and content digest,
and a manifest, indexes and data files that are that place's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Final

from tenuto.errors import CheckpointNotFound, CorruptionError, ObjectNotFound, StoreError, UsageError
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Json, Manifest
from tenuto.policy.encoding import Encoding
from tenuto.repo.format.manifest import MAX_MANIFEST, decode_manifest
from tenuto.repo.replicated.places import followers_of, home_of
from tenuto.repo.repository import Repo
from tenuto.store.contract import Store, is_unreadable

_FIELDS: Final = ("codec", "dedupe", "delta", "level")


def described(encoding: Encoding) -> Json:
    """Returns what a manifest says, in `environment.encoding.tier`, of the encoding of its place."""
    return {name: getattr(encoding, name) for name in _FIELDS}


def encoding_of_place(manifest: Manifest) -> Encoding | None:
    """Returns the encoding of the place for which a checkpoint was encoded anew; None where it is stored as it came."""
    about = manifest.environment.get("encoding")
    tier = about.get("tier") if isinstance(about, Mapping) else None
    try:
        return Encoding(**{name: tier[name] for name in _FIELDS}) if isinstance(tier, Mapping) else None
    except (KeyError, TypeError, UsageError):
        return None


def is_encoded_in(repo: Repo, place: Store, id: CheckpointId) -> bool:
    """Returns whether a place has a checkpoint in an encoding of its own, other than the primary."""
    try:
        theirs = place.get(id.manifest, limit=MAX_MANIFEST)
        found = decode_manifest(theirs, id, repo.id)
        if not isinstance(found, Manifest) or encoding_of_place(found) is None:
            return False
    except (ObjectNotFound, CorruptionError):
        return False
    try:
        return home_of(repo.store).get(id.manifest, limit=MAX_MANIFEST) != theirs
    except ObjectNotFound:
        return False
    except (CorruptionError, StoreError) as error:
        if isinstance(error, StoreError) and not is_unreadable(error):
            raise
        return True  # nobody knows what it was


def stand_ins(repo: Repo, id: CheckpointId) -> Iterator[Repo]:
    """Yields the repository as each tier has it that has a checkpoint in an encoding of its own, the fastest first."""
    for place in followers_of(repo.store):
        try:
            found = is_encoded_in(repo, place, id)
        except StoreError:
            continue
        if found:
            yield _as_in(repo, place)


def stand_in(repo: Repo, url: str) -> Repo | None:
    """Returns the repository as the tier with this URL has it; None where it is not known here."""
    return next((_as_in(repo, place) for place in followers_of(repo.store) if place.url == url), None)


def source_of(repo: Repo, manifest: Manifest) -> Repo:
    """Returns the repository as the place has it that this manifest was read from."""
    if encoding_of_place(manifest) is not None:
        for there in stand_ins(repo, manifest.id):
            with suppress(CheckpointNotFound, CorruptionError, StoreError):
                if there.manifest(manifest.id) == manifest:
                    return there
    return repo


def _as_in(repo: Repo, place: Store) -> Repo:
    there = Repo(place, repo.id, repo.chunk_bytes)
    there.share_keys(repo)
    return there
