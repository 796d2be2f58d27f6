"""Where the leaves of a capture go, one by one: for captures that copy some of them at once and others later."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import cast

from holdfast.image.capture import Capturer
from holdfast.state.contract import Bound, Flattened
from holdfast.state.ownership import Choice, LateBound, Span


class Places:
    """Where the leaves of one capturer go: made once for it. Does not hold it, nor its memory as a whole."""

    def __init__(self, capturer: Capturer) -> None:
        self.nbytes = capturer.layout.nbytes
        self.order = capturer.layout.order.tolist()
        self.length = capturer.layout.length.tolist()
        self.begin = capturer.layout.start.tolist()
        self.at: dict[int, tuple[Bound, int]] = {
            leaf: (bound, row) for leaves, bound in capturer.groups() for row, leaf in enumerate(leaves)
        }

    def capture_now(self, capturer: Capturer, flattened: Flattened, save_id: str, choice: Choice) -> None:
        """Copies what is not to be copied late, headers and padding too."""
        capturer.layout.stamp(capturer.arena.buffer, save_id)
        late = {span.leaf for span in choice.late}
        every = flattened.sources
        for leaves, bound in capturer.groups():
            sources = [every[leaf] for leaf in leaves]
            for first, stop in _runs(leaves, late):
                bound.copy(sources, first, stop)
        for bound, spans in self._by_bound(span for span in choice.watched if span.leaf in late):
            copies = bound.late([(every[leaf], self.at[leaf][1], start, stop) for leaf, start, stop in spans])
            for number in range(len(spans)):
                copies.copy(number)
        for _, bound in capturer.groups():
            bound.wait()

    def _by_bound(self, spans: Iterable[Span]) -> list[tuple[LateBound, list[tuple[int, int, int]]]]:
        found: dict[int, tuple[LateBound, list[tuple[int, int, int]]]] = {}
        for span in spans:
            bound = self.at[span.leaf][0]
            found.setdefault(id(bound), (cast(LateBound, bound), []))[1].append((span.leaf, span.start, span.stop))
        return list(found.values())


def _runs(leaves: Sequence[int], late: Collection[int]) -> list[tuple[int, int]]:
    """Runs of rows that are not late."""
    if not late:
        return [(0, len(leaves))]
    found: list[tuple[int, int]] = []
    first = 0
    for row, leaf in enumerate(leaves):
        if leaf in late:
            if first < row:
                found.append((first, row))
            first = row + 1
    if first < len(leaves):
        found.append((first, len(leaves)))
    return found
