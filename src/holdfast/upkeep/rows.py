"""Rows of numbered objects (notes, versions of a ref): what is damaged, was put there from elsewhere, or is gone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.errors import CorruptionError, ObjectNotFound
from holdfast.model import canonical
from holdfast.model.checkpoint import Json
from holdfast.repo import layout, objects
from holdfast.repo.repository import Repo
from holdfast.upkeep.findings import Severity


@dataclass(frozen=True, slots=True)
class Oddity:
    """Something about one object of a row."""

    name: str
    severity: Severity
    message: str


def row_oddities(repo: Repo, directory: str, numbers: Sequence[int]) -> Iterator[Oddity]:
    """What is wrong with `<directory>/<n>.json` for these numbers. None is ever removed by itself: a gap is a loss."""
    read: dict[int, dict[str, Json]] = {}
    for number in sorted(numbers):
        name = layout.numbered(directory, number)
        try:
            read[number] = canonical.open_seal(repo.store.get(name, limit=objects.SMALL), name=name)
        except ObjectNotFound:
            continue
        except CorruptionError as error:
            yield Oddity(name, "error", error.message)
    own = {number for number, found in read.items() if found.get("path") == layout.numbered(directory, number)}
    for number, found in read.items():
        name = layout.numbered(directory, number)
        if number not in own:
            # Where nothing is in its place a person has copied the row; beside objects that are, one was replaced.
            yield Oddity(name, "error" if own else "info", f"a copy of {str(found.get('path'))[:300]!r}")
        elif is_strange(repo, found):
            yield Oddity(name, "error", "belongs to another repository")
    if own:
        for number in sorted(set(range(1, max(own))) - set(numbers)):
            yield Oddity(layout.numbered(directory, number), "error", "is missing, although a later one is there")


def is_strange(repo: Repo, found: dict[str, Json]) -> bool:
    """Whether an object says that it was written for another repository. Those of earlier versions do not say."""
    return bool(found.get("repository", repo.id) != repo.id)
