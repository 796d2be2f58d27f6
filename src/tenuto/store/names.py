"""Valid names of objects, and how the temporaries of unfinished puts are marked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tenuto.errors import StoreError
from tenuto.store.contract import Entry, Store

TEMPORARY: Final = ".tmp-"
"""Part of the last segment of every temporary: `<final name>.tmp-<token>`."""
_LONGEST: Final = 4096


def check_name(name: str) -> str:
    """Returns `name` if it may name an object or a temporary, else raises StoreError. No name reaches outside a store,
    whatever a manifest contains."""
    if not isinstance(name, str) or not name:
        raise StoreError(f"{name!r} cannot name an object", subject=str(name))
    if len(name) > _LONGEST or "\0" in name or any(segment in ("", ".", "..") for segment in name.split("/")):
        raise StoreError(f"{name[:200]!r} cannot name an object: it is no relative path", subject=name[:200])
    try:
        name.encode()
    except UnicodeEncodeError:
        raise StoreError(f"{name!r} cannot name an object: it is no valid text", subject=repr(name)) from None
    return name


def check_new_name(name: str) -> str:
    """Returns `name` if a new object may have it, as `check_name`."""
    if TEMPORARY in check_name(name):
        raise StoreError(f"{name!r} cannot name an object: {TEMPORARY!r} marks temporaries", subject=name)
    if not name.isprintable():
        raise StoreError(
            f"{name!r} cannot name an object: it holds characters that no listing shows", subject=repr(name)
        )
    return name


def check_prefix(prefix: str) -> str:
    return prefix if prefix == "" else check_name(prefix)


def check_token(token: str) -> str:
    if not isinstance(token, str) or not token.isascii() or not token.replace("-", "").replace("_", "").isalnum():
        raise StoreError(f"{token!r} cannot mark temporaries: letters, digits, - and _ can", subject=str(token))
    return token


def is_leftover(name: str) -> bool:
    return TEMPORARY in name.rpartition("/")[2]


def leftovers_of(store: Store, prefix: str) -> Iterator[Entry]:
    """Yields the temporaries of unfinished puts below `prefix`."""
    return (entry for entry in store.walk(prefix, leftovers=True) if is_leftover(entry.name))


def is_listable(segment: str) -> bool:
    """Returns whether a file or directory of this name can be an object, a temporary or a directory of them."""
    return segment.isprintable()
