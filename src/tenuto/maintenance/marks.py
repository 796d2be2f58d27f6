"""Marks: since when a save is garbage, by the store's own clock.

A removal puts one as it moves a checkpoint into the trash, and gc's first visit puts one for whatever else nothing
reaches. A mark is no tombstone: a tombstone ends within seconds and holds up whoever comes to depend on the checkpoint;
a mark waits for a day, and is void as soon as its subject has changed.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from tenuto.errors import CorruptionError, ObjectNotFound
from tenuto.maintenance.census import MARKS, SaveDirectory, mark_directory
from tenuto.record import record
from tenuto.repo.format import objects
from tenuto.repo.repository import Repo, now_text
from tenuto.store.contract import Entry, time_of

GRACE_S: Final = 24 * 3600.0
"""How long a removed checkpoint can be brought back, and an unfinished save waits, unless the caller says otherwise."""
MARGIN_S: Final = 3600.0
"""How much longer a removed checkpoint's bytes stay, so that an undelete that begins within the grace can end."""

By = Literal["gc", "rm", "retention", "needed"]
"""needed: by retention, of what has no grace and stays in the trash only as long as others need its packs."""


@record
class Mark:
    """`created`: by the clock of the machine that put it, for people; ages are measured by the store's clock."""

    entry: Entry
    by: str
    created: str

    @property
    def goes(self) -> str:
        """Returns when a removed checkpoint's bytes may go, as text like `created`; empty if that cannot be read."""
        return self._after(GRACE_S + MARGIN_S)

    @property
    def until(self) -> str:
        """Returns until when a removed checkpoint can be brought back, as `goes`."""
        return self._after(GRACE_S)

    def _after(self, duration_s: float) -> str:
        try:
            when = datetime.fromisoformat(self.created) + timedelta(seconds=duration_s)
        except (ValueError, OverflowError):
            return ""
        return when.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def wait_s(save: SaveDirectory, grace_s: float) -> float:
    """Returns how long after its mark the save's bytes may go. Without a grace nothing waits."""
    return grace_s + MARGIN_S if save.state == "removed" and grace_s > 0 else grace_s


@contextmanager
def probe(repo: Repo) -> Iterator[str]:
    """Puts an object to read the store's clock from, and deletes it at the end of the block. Yields its name."""
    token = secrets.token_hex(16)
    name = f"{MARKS}/probe-{token}.json"
    objects.put(repo.store, name, objects.encode("probe", name, {"id": token}, repo.id), token=token)
    try:
        yield name
    finally:
        repo.store.delete([name])


def store_now(repo: Repo) -> int:
    """Returns the store's clock, in ns."""
    with probe(repo) as name:
        return repo.store.stat(name).modified_ns


def age_s(repo: Repo, entry: Entry, now_ns: int) -> float:
    """Returns the seconds since the object was put, by the store's clock; 0 if it vanished."""
    modified_ns = time_of(repo.store, entry)
    return 0.0 if modified_ns is None else (now_ns - modified_ns) / 1e9


def put_mark(repo: Repo, save: SaveDirectory, *, by: By) -> None:
    token = secrets.token_hex(16)
    name = f"{mark_directory(save.id)}/{token}.json"
    body = {"by": by, "created": now_text(), "id": token, "subject": _subject(save)}
    objects.put(repo.store, name, objects.encode("mark", name, body, repo.id), token=token)


def valid_marks(repo: Repo, save: SaveDirectory) -> list[Mark]:
    """Returns the marks that refer to the save as it is now. One from before a removal that was undone and repeated
    does not count: otherwise the second removal had no grace."""
    found = (_read(repo, entry, save) for entry in save.marks)
    return [mark for mark in found if mark is not None]


def _read(repo: Repo, entry: Entry, save: SaveDirectory) -> Mark | None:
    try:
        found = objects.decode("mark", entry.name, repo.store.get(entry.name, limit=objects.SMALL), repo.id)
        if found.text("subject") != _subject(save):
            return None
        return Mark(entry, found.text("by"), found.text("created"))
    except (ObjectNotFound, CorruptionError):
        return None


def _subject(save: SaveDirectory) -> str:
    """Returns the subject of a mark: a removed checkpoint by its removals (each has its own copy in the trash), a save
    by its id."""
    if save.state == "removed":
        return "removed " + " ".join(sorted(entry.name.rpartition("/")[2] for entry in save.trash))
    return f"unfinished {save.save_id}"
