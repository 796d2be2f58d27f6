"""For the error where no repository is: the nearest place that is one. A bounded look, for local places above too."""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from holdfast.errors import StoreError
from holdfast.repo.layout import REPOSITORY
from holdfast.store.contract import Store

_ABOVE: Final = 8
_BELOW: Final = 64


def nearby(store: Store) -> str | None:
    """The URL or path of a repository one level below, or at most eight levels above; None if there is none."""
    place = store.url.rstrip("/")
    try:
        for directory in store.children("").directories[:_BELOW]:
            if REPOSITORY in store.children(directory).objects:
                return f"{place}/{directory}"
    except StoreError:
        return None  # only the hint is lost; what is wrong with the place is said by the read that came before
    return _above(store.url)


def _above(url: str) -> str | None:
    parts = urlsplit(url)
    if parts.scheme not in ("", "file"):
        return None
    path = Path(unquote(parts.path) if parts.scheme else url).absolute()
    for parent in list(path.parents)[:_ABOVE]:
        try:
            if (parent / REPOSITORY).is_file():
                return str(parent)
        except OSError:
            continue
    return None
