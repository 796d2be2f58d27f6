"""The records of a claim, a lease and a save: `attempt.json`, `lease/<n>.json` and `begin.json`."""

from __future__ import annotations

from tenuto.errors import CorruptionError
from tenuto.model.ids import CheckpointId
from tenuto.model.records import AttemptRecord, Json, Owner
from tenuto.record import record
from tenuto.repo.format import objects
from tenuto.repo.format.object_names import attempt_name, begin_name, check_file, lease_directory, numbered
from tenuto.repo.format.objects import Fields, Sign, checkpoint_json


@record
class Begin:
    """A save that begins. `names`: the files it will write in the checkpoint's directory. `parent`: of its attempt.
    `bases`: the checkpoints of which it may name packs. `newest_first`: it is begun before any other of its attempt is
    committed, and committed after all newer ones."""

    id: CheckpointId
    save_id: str
    names: tuple[str, ...]
    parent: CheckpointId | None
    bases: tuple[CheckpointId, ...] = ()
    newest_first: bool = False


@record
class LeaseRecord:
    """One beat of an attempt's lease.

    - `id`, `parent`: of the attempt, repeated so that no single damaged object hides its origin.
    - `closed`: no unfinished save of an earlier attempt is left.
    - `released`: the owner is done.
    - `leaving`: the owner saves what is left to save, and is done then.
    - `newest`: the step that it has committed last, None before the first: a hint where to begin to look.
    """

    number: int
    id: str
    parent: CheckpointId | None
    closed: bool
    released: bool
    leaving: bool = False
    newest: int | None = None


def encode_attempt(record: AttemptRecord, repository: str, sign: Sign | None = None) -> bytes:
    return objects.encode(
        "attempt",
        attempt_name(record.run, record.number),
        {
            "attempt": record.number,
            **({"by": record.by} if record.by else {}),
            **({"reason": record.reason} if record.reason else {}),
            **({} if record.before is None else {"before": {"attempt": record.before[0], "step": record.before[1]}}),
            "created": record.created,
            **({} if record.ended is None else {"ended": {"beats": record.ended[0], "failed": record.ended[1]}}),
            "id": record.id,
            "owner": owner_json(record.owner),
            "parent": checkpoint_json(record.parent),
            "run": record.run,
        },
        repository,
        sign=sign,
    )


def decode_attempt(data: bytes, run: str, number: int, repository: str) -> AttemptRecord:
    return read_attempt(objects.decode("attempt", attempt_name(run, number), data, repository), run, number)


def read_attempt(found: Fields, run: str, number: int) -> AttemptRecord:
    if found.text("run") != run or found.whole("attempt") != number:
        raise found.refuse("names another attempt than its own")
    parent = found.checkpoint("parent")
    check_parent(parent, run, number, found)
    by, reason = (found.text(name) if name in found.values else "" for name in ("by", "reason"))
    return AttemptRecord(
        run,
        number,
        found.hex("id", 32),
        parent,
        read_owner(found),
        found.text("created"),
        _before(found),
        _ended(found),
        by,
        reason,
    )


def _ended(found: Fields) -> tuple[int, bool] | None:
    if "ended" not in found.values:
        return None
    inner = found.inner(found.mapping("ended"), "'ended'")
    return inner.whole("beats"), inner.flag("failed")


def _before(found: Fields) -> tuple[int, int] | None:
    if "before" not in found.values:
        return None
    inner = found.inner(found.mapping("before"), "'before'")
    return inner.whole("attempt", minimum=1), inner.whole("step")


def check_parent(parent: CheckpointId | None, run: str, number: int, found: Fields) -> None:
    """Checks that a parent is a lower attempt of the run, or in another run: the walk within a run always descends."""
    if parent is not None and parent.run == run and parent.attempt >= number:
        raise found.refuse(f"has the parent {parent}, which is not lower than attempt {number} itself")


def owner_json(owner: Owner) -> Json:
    return {
        "boot": owner.boot,
        "host": owner.host,
        "pid": owner.pid,
        "pid_namespace": owner.pid_namespace,
        "started": owner.started,
        "user": owner.user,
    }


def read_owner(found: Fields) -> Owner:
    inner = Fields(found.mapping("owner"), found.name)
    return Owner(
        host=inner.text("host"),
        boot=inner.text("boot"),
        pid_namespace=inner.text("pid_namespace"),
        pid=inner.whole("pid"),
        started=inner.text("started"),
        user=inner.text("user"),
    )


def encode_begin(begin: Begin, repository: str, sign: Sign | None = None) -> bytes:
    return objects.encode(
        "begin",
        begin_name(begin.id),
        {
            **objects.bases_json(begin.bases),
            "names": sorted(begin.names),
            **({"newest_first": True} if begin.newest_first else {}),
            "parent": checkpoint_json(begin.parent),
            "save_id": begin.save_id,
        },
        repository,
        format=objects.ENCODED if begin.bases else objects.FORMAT,
        sign=sign,
    )


def decode_begin(data: bytes, id: CheckpointId, repository: str) -> Begin:
    name = begin_name(id)
    found = objects.decode("begin", name, data, repository)
    names = tuple(check_file(file, subject=name) for file in found.sequence("names"))
    if len(set(names)) != len(names):
        raise CorruptionError(f"{name} lists a name twice", subject=name)
    parent = found.checkpoint("parent")
    check_parent(parent, id.run, id.attempt, found)
    newest_first = "newest_first" in found.values and found.flag("newest_first")
    return Begin(id, found.hex("save_id", 32), names, parent, found.bases(id), newest_first)


def encode_lease(lease: LeaseRecord, run: str, attempt: int, repository: str, sign: Sign | None = None) -> bytes:
    return objects.encode(
        "lease",
        numbered(lease_directory(run, attempt), lease.number),
        {
            "closed": lease.closed,
            "id": lease.id,
            **({"leaving": True} if lease.leaving else {}),
            **({"newest": lease.newest} if lease.newest is not None else {}),
            "parent": checkpoint_json(lease.parent),
            "released": lease.released,
        },
        repository,
        sign=sign,
    )


def decode_lease(data: bytes, run: str, attempt: int, number: int, repository: str) -> LeaseRecord:
    found = objects.decode("lease", numbered(lease_directory(run, attempt), number), data, repository)
    parent = found.checkpoint("parent")
    check_parent(parent, run, attempt, found)
    leaving = found.flag("leaving") if "leaving" in found.values else False
    newest = found.whole("newest") if "newest" in found.values else None
    return LeaseRecord(
        number, found.hex("id", 32), parent, found.flag("closed"), found.flag("released"), leaving, newest
    )
