"""Rows of numbered objects, `<directory>/<n>.json`: append-only, the highest wins where only one counts."""

from __future__ import annotations

import secrets
from typing import Final

from holdfast.errors import AlreadyExists, StoreUnavailable
from holdfast.model.checkpoint import Json
from holdfast.repo import layout, objects
from holdfast.repo.repository import Repo

_TRIES: Final = 100


def numbers(repo: Repo, directory: str) -> list[int]:
    """The numbers there are, ascending."""
    found = (layout.parse_numbered(file) for file in repo.store.children(directory).objects)
    return sorted(number for number in found if number is not None)


def append(repo: Repo, directory: str, kind: str, body: dict[str, Json]) -> int:
    """Puts `body` under the next number, and returns that. `id` is drawn here: so a lost reply can be told."""
    token = secrets.token_hex(16)
    number = max(numbers(repo, directory), default=0)
    for _ in range(_TRIES):
        number += 1
        name = layout.numbered(directory, number)
        try:
            data = objects.encode(kind, name, {**body, "id": token, "repository": repo.id})
            objects.put(repo.store, name, data, token=token)
            return number
        except AlreadyExists:
            continue
    raise StoreUnavailable(f"no free number below {directory} in {_TRIES} tries: others put faster", subject=directory)
