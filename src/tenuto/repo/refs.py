"""Refs: small versioned names that keep a checkpoint. `refs/<kind>/<name>/<n>.json`, the highest number wins.

kind: `tag` (a name for people), `pin` (retention keeps it), `hold` (a machine needs it for now). They are the
repository's, not a run's: a tag put again, in whatever run, has moved.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Literal

from tenuto.codec.digest import digest
from tenuto.errors import (
    AlreadyExists,
    CheckpointNotFound,
    CorruptionError,
    ObjectNotFound,
    StoreUnavailable,
    StoreUnreliable,
    TenutoError,
    UsageError,
)
from tenuto.model.ids import CheckpointId, attempt_key, run_key
from tenuto.model.records import Json
from tenuto.record import record
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.object_names import numbered
from tenuto.repo.format.objects import checkpoint_json
from tenuto.repo.repository import Repo, now_text
from tenuto.repo.tombstones import is_tombstoned

# --------------------------------------------------------------------------------------------------
# Rows of numbered objects, `<directory>/<n>.json`: append-only, the highest wins where only one counts.

_TRIES: Final = 100


def numbers(repo: Repo, directory: str) -> list[int]:
    """Returns the existing numbers, ascending."""
    found = (object_names.parse_numbered(file) for file in repo.store.children(directory).objects)
    return sorted(number for number in found if number is not None)


def append(repo: Repo, directory: str, kind: str, body: dict[str, Json]) -> int:
    """Puts `body` under the next number, and returns that. `id` is drawn here: so a lost reply can be told."""
    token = secrets.token_hex(16)
    number = max(numbers(repo, directory), default=0)
    for _ in range(_TRIES):
        number += 1
        name = object_names.numbered(directory, number)
        try:
            data = objects.encode(kind, name, {**body, "id": token}, repo.id, sign=repo.signer)
            objects.put(repo.store, name, data, token=token)
            return number
        except AlreadyExists:
            continue
        except StoreUnreliable:
            _take_back(repo, name, data)
            raise
    raise StoreUnavailable(f"no free number below {directory} in {_TRIES} tries: others put faster", subject=directory)


def _take_back(repo: Repo, name: str, data: bytes) -> None:
    """Removes what a failed put may have left visible and not durable: the next one would take the number after it, and
    a power loss would leave a gap, which is what a lost object looks like."""
    with suppress(TenutoError):  # the failure of the put is what is raised
        if repo.store.get(name, limit=len(data)) == data:
            repo.store.delete([name])


Kind = Literal["tag", "pin", "hold"]
KINDS: Final[tuple[Kind, ...]] = ("hold", "pin", "tag")


LONGEST: Final = 100
"""Characters of a ref's name."""
LATEST: Final = "latest"
"""What no tag may be called: it always means the newest checkpoint."""


@record
class Ref:
    kind: str
    name: str
    id: CheckpointId
    reason: str = ""
    """Why it keeps the checkpoint, in the words of who put it."""


def check_tag(name: object) -> str:
    """Returns `name` if it can be a tag: it may be given where a step is expected, and is no step."""
    if not isinstance(name, str) or not is_name(name) or name == LATEST or name.isdigit():
        raise UsageError(
            f"{name!r} cannot be a tag",
            subject=str(name),
            hint="use lower-case letters, digits and . _ = -, at most 100, not digits alone, and not the word latest",
        )
    return name


def find_tag(repo: Repo, name: str) -> CheckpointId | None:
    """Returns the checkpoint with this tag, None if there is none. Raises CorruptionError like `read_ref`."""
    return read_ref(repo, "tag", name) if is_name(name) else None


def list_tags(repo: Repo) -> dict[str, CheckpointId]:
    """Returns all tags in use with their checkpoints, by name. Raises CorruptionError like `read_ref`."""
    return {ref.name: ref.id for ref in list_refs(repo, kinds=("tag",))}


def put_ref(repo: Repo, kind: Kind, name: str, id: CheckpointId, reason: str = "") -> Ref:
    """Points the ref at a checkpoint, and relies on it from now on. Raises CheckpointNotFound if that is gone or going:
    the ref then points where it pointed before. One whose newest version is damaged is mended so: nobody knows where it
    pointed, and it points nowhere if the checkpoint goes right now."""
    directory = _directory(kind, check_tag(name) if kind == "tag" else name)
    before: CheckpointId | None = None
    if not is_damaged(repo, kind, name):
        before = read_ref(repo, kind, name)
    elif _is_going(repo, id):
        raise _gone(id)
    _put(repo, directory, id, reason)
    repo.store.settle(id.manifest)
    if _is_going(repo, id):
        _put(repo, directory, before)
        raise _gone(id)
    return Ref(kind, name, id, reason)


def clear_ref(repo: Repo, kind: Kind, name: str) -> None:
    """Makes the ref point at nothing; its history stays."""
    if is_damaged(repo, kind, name) or read_ref(repo, kind, name) is not None:
        _put(repo, _directory(kind, name), None)


def release(repo: Repo, kind: Kind, id: CheckpointId) -> list[Ref]:
    """Makes every ref of this kind that keeps a checkpoint point at nothing, and returns what they were."""
    found = [ref for ref in list_refs(repo, kinds=(kind,)) if ref.id == id]
    for ref in found:
        clear_ref(repo, kind, ref.name)
    return found


def read_ref(repo: Repo, kind: Kind, name: str) -> CheckpointId | None:
    """Returns the checkpoint that the ref points at, None if it points at nothing. Raises CorruptionError if its newest
    version cannot be read: nobody may then act as if it pointed at nothing."""
    found = find_ref(repo, kind, name)
    return None if found is None else found.id


def find_ref(repo: Repo, kind: Kind, name: str) -> Ref | None:
    """Returns the ref, None if it points at nothing. Raises CorruptionError like `read_ref`."""
    directory = _directory(kind, name)
    for number in reversed(numbers(repo, directory)):
        place = numbered(directory, number)
        try:
            data = repo.store.get(place, limit=objects.SMALL)
        except ObjectNotFound:
            continue
        if not objects.is_copy(place, data, repo.id):
            fields = repo.decode("ref", place, data)
            id = fields.checkpoint("to")
            reason = fields.text("reason") if "reason" in fields.values else ""
            return None if id is None else Ref(kind, name, id, reason)
    return None


def is_damaged(repo: Repo, kind: Kind, name: str) -> bool:
    """Returns whether the ref's newest version cannot be read. It blocks every removal until a new version is put."""
    try:
        read_ref(repo, kind, name)
    except CorruptionError:
        return True
    return False


def list_refs(repo: Repo, kinds: Sequence[Kind] = KINDS, *, damaged: Callable[[str], None] | None = None) -> list[Ref]:
    """Returns every ref that points at a checkpoint, by kind and name.

    One that cannot be read may point at any: it raises CorruptionError like `read_ref`, or `damaged` is told which.
    """
    found = []
    for kind in kinds:
        for name in repo.store.children(f"refs/{kind}").directories:
            if is_name(name):
                try:
                    ref = find_ref(repo, kind, name)
                except CorruptionError:
                    if damaged is None:
                        raise
                    damaged(f"{kind} {name!r} cannot be read")
                    continue
                if ref is not None:
                    found.append(ref)
    return found


def _is_going(repo: Repo, id: CheckpointId) -> bool:
    return not repo.exists(id) or is_tombstoned(repo, id)


def _gone(id: CheckpointId) -> CheckpointNotFound:
    return CheckpointNotFound(f"checkpoint {id} is not there, or is being removed", subject=str(id))


def pin_name(id: CheckpointId) -> str:
    """Returns the name of the pin, or the hold, that a person puts on a checkpoint: there is one of each."""
    name = f"{run_key(id.run)}={attempt_key(id.attempt)}={id.step}"
    return name if len(name) <= LONGEST else f"{digest(name.encode()).hex()}={attempt_key(id.attempt)}={id.step}"


def _put(repo: Repo, directory: str, id: CheckpointId | None, reason: str = "") -> None:
    why: dict[str, Json] = {"reason": reason} if reason else {}
    append(repo, directory, "ref", {"created": now_text(), "to": checkpoint_json(id), **why})


def _directory(kind: Kind, name: str) -> str:
    if kind not in KINDS or not is_name(name):
        raise UsageError(
            f"{kind} {name!r} cannot name a ref", subject=name, hint="use lower-case letters, digits and . _ = -"
        )
    return f"refs/{kind}/{name}"


def is_name(name: str) -> bool:
    """Returns whether a ref can have this name."""
    try:
        return run_key(name) == name
    except UsageError:
        return False
