"""Finds one leaf in the text of a tree, so that opening a checkpoint need not build ten thousand nodes.

A look-up returns exactly what reading the full tree would find at the path, or that it cannot tell.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from tenuto.errors import CorruptionError
from tenuto.model import canonical_json
from tenuto.model.leaf import escape, unescape
from tenuto.model.records import Json
from tenuto.state.tree import KEYED, LEAVES, NAMED, WRAPPERS

_NOT_SHAPE: Final = bytes(byte for byte in range(256) if byte not in b'"[]{}')
_IS_BRACKET: Final = bytes(byte in b"[]{}" for byte in range(256))
_IS_SHAPE: Final = bytes(byte in b'"[]{}' for byte in range(256))
_ESCAPE: Final = re.compile(rb"\\.", re.DOTALL)
_KIND: Final = re.compile(rb'\{"!":"([a-z.]+)"')
_NUMBER: Final = re.compile(r"#i:(-?[0-9]{1,15})")
_WRAPPERS: Final = WRAPPERS - {"private"}
_BLOCK: Final = 1 << 16
_FEW: Final = 64

Column = np.ndarray[Any, Any]


class TreeText:
    """The canonical JSON of a tree with the positions and depths of its brackets.

    Raises ValueError unless the text is one object or list from its first to its last byte.
    """

    def __init__(self, data: bytes, start: int = 0, stop: int | None = None) -> None:
        """The text is `data[start:stop]`."""
        stop = len(data) if stop is None else stop
        if start >= stop:
            raise ValueError("no text")
        self._at, brackets = _brackets(data, start, stop)
        # "[" is 0x5B and "{" 0x7B; "]" and "}" are two more.
        self._depth = np.cumsum(0x5C - (brackets & 0x5F).astype(np.int8), dtype=np.int32)
        self._text, self._start, self._end = data, start, stop
        depth = self._depth
        if not depth.size or self._at[0] != start or self._at[-1] != stop - 1:
            raise ValueError("no object or list")
        if depth[-1] != 0 or int(depth[:-1].min(initial=1)) < 1:
            raise ValueError("more than one value")
        if int(depth.max()) > canonical_json.MAX_DEPTH:
            raise CorruptionError(f"the tree is nested deeper than {canonical_json.MAX_DEPTH} levels")

    @property
    def text(self) -> bytes:
        return self._text[self._start : self._end]

    def find(self, path: str) -> Json | None:
        """Returns the node of the leaf or alias at `path`; None without one, or if only the full tree can tell."""
        if path.endswith("/"):
            return None  # no leaf's path ends so; the rest below it would be empty, as at the leaf before
        start, rest = self._start, path
        while True:
            bracket = int(np.searchsorted(self._at, start))
            kind = _KIND.match(self._text, start)
            if kind is None or bracket >= len(self._at) or self._at[bracket] != start:
                return None
            name = kind[1].decode()
            stop = self._stop(bracket)
            if name in LEAVES:
                return canonical_json.loads(self._text[start:stop]) if not rest else None
            below = self._below(name, bracket, stop, rest)
            if below is None:
                return None
            start, rest = below

    def _below(self, kind: str, bracket: int, stop: int, rest: str) -> tuple[int, str] | None:
        """Returns the start of the next node, and the rest of the path."""
        start, depth = int(self._at[bracket]), int(self._depth[bracket])
        if kind in _WRAPPERS:
            inner = self._first(b',"v":', start, stop, depth)
            return None if inner is None or self._first(b',"v":', inner, stop, depth) is not None else (inner, rest)
        if kind not in KEYED and kind not in NAMED and kind != "bypath":
            return None
        after = self._first(b',"i":[', start, stop, depth) if rest else None
        if after is None:
            return None
        # The pairs' own list: other fields of the node may contain lists that look like pairs.
        end = self._stop(int(np.searchsorted(self._at, after - 1)))
        if self._first(b',"i":', end, stop, depth) is not None:
            return None
        start, stop = after - 1, end
        if kind == "bypath":
            return self._by_path(start, stop, depth + 2, rest)
        head, _, left = rest.partition("/")
        token = _key(head)
        inner = self._pair(token, start, stop, depth + 2) if token is not None else None
        return None if inner is None else (inner, left)

    def _by_path(self, start: int, stop: int, depth: int, rest: str) -> tuple[int, str] | None:
        """Finds the name that `rest` starts with, if exactly one does: names here are full paths."""
        parts = rest.split("/")
        found = []
        for count in range(1, len(parts) + 1):
            inner = self._pair(_pair_of("/".join(parts[:count])), start, stop, depth)
            if inner is not None:
                found.append((inner, "/".join(parts[count:])))
        return found[0] if len(found) == 1 else None

    def _stop(self, bracket: int) -> int:
        """Returns the end of what the bracket opens."""
        depth = int(self._depth[bracket])
        return int(self._at[bracket + int(np.argmax(self._depth[bracket:] == depth - 1))]) + 1

    def _first(self, token: bytes, start: int, stop: int, depth: int) -> int | None:
        """Returns the end of the first `token` directly inside `depth` brackets, between start and stop."""
        place = self._text.find(token, start, stop)
        while place >= 0:
            if int(self._depth[int(np.searchsorted(self._at, place)) - 1]) == depth:
                return place + len(token)
            place = self._text.find(token, place + 1, stop)
        return None

    def _pair(self, token: bytes, start: int, stop: int, depth: int) -> int | None:
        """Returns the end of `token`, the beginning of a pair, if exactly one has the `depth`-th bracket."""
        found = None
        for place in self._places(token, start, stop, depth):
            if found is not None:
                return None
            found = place + len(token)
        return found

    def _places(self, token: bytes, start: int, stop: int, depth: int) -> Iterator[int]:
        """Yields every place where `token` begins with the `depth`-th bracket. Tests few brackets one by one; for many
        a search in the text is faster."""
        first, last = np.searchsorted(self._at, (start, stop)).tolist()
        same = self._depth[first:last] == depth
        if np.count_nonzero(same) <= _FEW:
            places = self._at[first:last][same].tolist()
            yield from (place for place in places if self._text.startswith(token, place, stop))
            return
        place = self._text.find(token, start, stop)
        while place >= 0:
            bracket = int(np.searchsorted(self._at, place))
            if self._at[bracket] == place and int(self._depth[bracket]) == depth:
                yield place
            place = self._text.find(token, place + 1, stop)


def _brackets(data: bytes, start: int, stop: int) -> tuple[Column, Column]:
    """Returns the positions of the brackets outside strings, and the brackets. Works in blocks that fit into the
    cache."""
    places, brackets = [], []
    open_quote = False
    while start < stop:
        end = min(start + _BLOCK, stop)
        while data[end - 1] == ord("\\") and end < stop:
            end += 1  # does not cut an escape in two
        block = data[start:end]
        plain = _ESCAPE.sub(b"__", block) if b"\\" in block else block
        shape = np.frombuffer(plain.translate(None, _NOT_SHAPE), np.uint8)
        quotes = shape == ord('"')
        inside = np.logical_xor.accumulate(quotes) ^ open_quote
        outside = ~(inside | quotes)
        if np.array_equal(outside, ~quotes):  # no string of this block contains a bracket
            places.append(np.flatnonzero(np.frombuffer(plain.translate(_IS_BRACKET), bool)) + start)
        else:
            places.append(np.flatnonzero(np.frombuffer(plain.translate(_IS_SHAPE), bool))[outside] + start)
        brackets.append(shape[outside])
        if len(inside):
            open_quote = bool(inside[-1])
        start = end
    return np.concatenate(places), np.concatenate(brackets)


def _key(segment: str) -> bytes | None:
    """Returns the beginning of a pair with this key; None for keys that need the full tree."""
    if not segment.startswith("#"):
        key = unescape(segment)
        return _pair_of(key) if key and escape(key) == segment else None
    if segment == "#s:":
        return _pair_of("")
    number = _NUMBER.fullmatch(segment)
    return b"[%b," % number[1].encode() if number else None


def _pair_of(key: Any) -> bytes:
    return b"[%b," % json.dumps(key).encode()
