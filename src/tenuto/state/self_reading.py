"""The device of leaves that are read as they are captured: each source reads any part of itself into the image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tenuto.model.leaf import LeafSpec
from tenuto.state.contract import Buffer


class _Bound:
    def __init__(self, views: Sequence[Buffer]) -> None:
        self._views = views

    def copy(self, sources: Sequence[Any], start: int, stop: int) -> None:
        for leaf in range(start, stop):
            if len(self._views[leaf]):
                sources[leaf].read_into(self._views[leaf], 0)

    def copy_part(self, source: Any, leaf: int, start: int, stop: int) -> None:
        source.read_into(self._views[leaf][start:stop], start)

    def splits(self, source: Any) -> bool:
        return True

    def wait(self) -> None:
        pass


@dataclass(slots=True)
class SelfReading:
    """Sources have `read_into(out, start)`, which fills `out` with their bytes from `start` on."""

    name: str

    def bind(self, specs: Sequence[LeafSpec], views: Sequence[Buffer], *, stays: bool = True) -> _Bound:
        return _Bound(views)
