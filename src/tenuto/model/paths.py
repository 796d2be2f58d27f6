"""Paths of leaves: RFC 6901 pointers with two more escapes and typed keys.

A path is segments joined by `/`. In a segment `~0` is `~`, `~1` is `/`, `~2` is `@` (which marks a part of a leaf in
pack names), `~3` a leading `#` of a string key. A segment that starts with `#` is a non-string key (`#i:3`: the int 3)
or one of Tenuto's own names, so that the two never collide.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tenuto.errors import Unserialisable

METADATA: Final = "__metadata__"


def escape(key: str) -> str:
    """Returns a string key as a path segment."""
    if not key.isascii():
        try:
            key.encode("utf-8")
        except UnicodeEncodeError:
            raise Unserialisable(
                f"the key {key!r} holds a lone surrogate, which no file format can name", subject=ascii(key)
            ) from None
    elif "~" not in key and "/" not in key and "@" not in key and key[:1] != "#":
        return key
    out = key.replace("~", "~0").replace("/", "~1").replace("@", "~2")
    return "~3" + out[1:] if out.startswith("#") else out


def unescape(segment: str) -> str:
    """Returns the string key of a segment made by `escape`."""
    if segment.startswith("~3"):
        segment = "#" + segment[2:]
    return segment.replace("~2", "@").replace("~1", "/").replace("~0", "~")


def join(parent: str, segment: str) -> str:
    """Appends the escaped `segment` to `parent`; the root is the empty path."""
    return f"{parent}/{segment}" if parent else segment


def lineage(path: str) -> Iterator[str]:
    """Yields the path and all its ancestors except the root."""
    yield path
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path
