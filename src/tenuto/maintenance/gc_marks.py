"""What gc leaves between its two visits: a mark that says what nothing needed, and the store's own time of saying so.

Marks lie apart from the tombstones of removals: those end within seconds and hold up whoever comes to depend on the
checkpoint; a mark waits for days, and is void as soon as what it speaks of has changed.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tenuto.errors import CorruptionError, ObjectNotFound
from tenuto.maintenance.census import MARKS, SaveDirectory, mark_directory
from tenuto.repo.format import objects
from tenuto.repo.repository import Repo, now_text
from tenuto.store.contract import Entry


@contextmanager
def probe(repo: Repo) -> Iterator[str]:
    """The name of an object put just now: what its store calls now. It is deleted again."""
    token = secrets.token_hex(16)
    name = f"{MARKS}/probe-{token}.json"
    objects.put(repo.store, name, objects.encode("probe", name, {"id": token}), token=token)
    try:
        yield name
    finally:
        repo.store.delete([name])


def store_now(repo: Repo) -> int:
    """The store's clock, in ns."""
    with probe(repo) as name:
        return repo.store.stat(name).modified_ns


def age_s(repo: Repo, entry: Entry, now_ns: int) -> float:
    """Seconds since the object was put, by the store's clock; 0 if it vanished."""
    try:
        return (now_ns - repo.store.stat(entry.name).modified_ns) / 1e9
    except ObjectNotFound:
        return 0.0


def put_mark(repo: Repo, save: SaveDirectory) -> None:
    token = secrets.token_hex(16)
    name = f"{mark_directory(save.id)}/{token}.json"
    body = {"created": now_text(), "id": token, "repository": repo.id, "subject": _subject(save)}
    objects.put(repo.store, name, objects.encode("mark", name, body), token=token)


def standing_marks(repo: Repo, save: SaveDirectory) -> list[Entry]:
    """The marks that speak of the save as it is now. One put before a removal that was taken back and repeated does
    not count: else the second removal had no grace."""
    return [entry for entry in save.marks if _speaks_of(repo, entry, save)]


def take_back_marks(repo: Repo, marks: Iterable[Entry]) -> None:
    repo.store.delete([entry.name for entry in marks])


def _speaks_of(repo: Repo, entry: Entry, save: SaveDirectory) -> bool:
    try:
        found = objects.decode("mark", entry.name, repo.store.get(entry.name, limit=objects.SMALL))
        return found.text("subject") == _subject(save)
    except (ObjectNotFound, CorruptionError):
        return False


def _subject(save: SaveDirectory) -> str:
    """What is marked: a removed checkpoint by its removals (each has a trash copy of its own), a save by its id."""
    if save.state == "removed":
        return "removed " + " ".join(sorted(entry.name.rpartition("/")[2] for entry in save.trash))
    return f"unfinished {save.save_id}"
