"""The state as it goes into a save: the user's, this process's own, and what the manifest says about both."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from holdfast.api.environment import environment
from holdfast.api.position import Position
from holdfast.api.samples import counts_changes, samples, unchanged
from holdfast.codec.digest import digest
from holdfast.engine.job import About
from holdfast.errors import HoldfastError
from holdfast.model.checkpoint import Json
from holdfast.model.leaf import LeafSpec
from holdfast.model.names import CheckpointId
from holdfast.state.certificate import certificate, elsewhere
from holdfast.state.contract import Flattened
from holdfast.state.flattener import Flattener
from holdfast.state.nodes import PRIVATE, items

RANDOM: Final = "random"
DATA: Final = "data"
FEW_TENSORS: Final = 64
"""So many are looked into at the end of a step that a metric which comes late may yet ask for: that is at every step,
and the state is seldom asked about."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A completed step that could still be saved, as long as nothing has changed the state since."""

    step: int
    flattened: Flattened
    besides: frozenset[str]
    """Entries of what is private that may have moved on."""
    marks: tuple[Any, ...]
    samples: Mapping[int, Any]
    progress: Mapping[str, Json]


class Snapshots:
    """Flattens one training state again and again."""

    def __init__(
        self, state: Mapping[str, Any], position: Position, *, watched: Mapping[str, str] | None = None
    ) -> None:
        """`watched`: the metrics that policies go by, and which do. What is saved says so, for a person to see there
        that one was never logged."""
        self._state = state
        self._watched = dict(watched or {})
        self._position = position
        self._private: dict[str, Any] = {}
        self._flattener = Flattener(state, private=self._private)
        self._environment: dict[str, Json] | None = None

    def now(self) -> Flattened:
        self._private.update(self._position.private())
        return self._flattener.flatten()

    def about(
        self,
        *,
        parent: CheckpointId | None,
        metrics: Mapping[str, float],
        reason: str,
        progress: Mapping[str, Json] | None = None,
    ) -> About:
        if self._environment is None:
            self._environment = environment()
        return About(
            parent=parent,
            metrics=dict(metrics),
            progress=dict(progress) if progress is not None else self._position.progress(),
            environment=self._environment,
            certificate=self.certificate(),
            reason=reason,
            marks=self._position.marks(),
        )

    def certificate(self) -> dict[str, Json]:
        found = certificate(self._state, self._position.data)
        found["caveats"] += self._position.caveats + self._position.reasons
        if self._position.world_size > 1:
            found["at_other_ranks"] = elsewhere(self._position.data)
        return {**found, "watches": dict(self._watched)} if self._watched else found

    def moment(self) -> Moment | None:
        """How the state is now, so that it can be saved later as it is now. What is random may have moved on by then:
        the moment has copies of it. None where the state cannot be represented (the next save says so)."""
        return self._moment(frozenset({RANDOM}), None)

    def passing_moment(self) -> Moment | None:
        """How the state is now; what is saved later is what is there then. So the position in the data may have moved
        on as well. Cheap enough for every step: it looks into some of the tensors alone."""
        return self._moment(frozenset({RANDOM, DATA}), FEW_TENSORS)

    def _moment(self, besides: frozenset[str], most: int | None) -> Moment | None:
        try:
            flattened = self.now()
        except HoldfastError:
            return None
        marks = tuple(_mark(spec, source) for spec, source in _rows(flattened, besides))
        shared = flattened.sources[: sum(not spec.private for spec in flattened.specs)]
        step, progress = self._position.counters.step, self._position.progress()
        return Moment(step, flattened, besides, marks, samples(shared, most), progress)

    def untouched(self, moment: Moment, *, plain: bool = True) -> bool:
        """Whether the state is as it was at `moment`, as far as can be seen: tensors count their changes, and a few of
        their elements are compared; all else is compared as a whole. `plain=False`: but for the state's plain values,
        which the moment has copies of."""
        now, then = self.now(), moment.flattened
        rows, before = list(_rows(now, moment.besides)), list(_rows(then, moment.besides))
        return (
            [spec for spec, _ in rows] == [spec for spec, _ in before]
            and (not plain or now.tree == then.tree)
            and _entries(now, moment.besides) == _entries(then, moment.besides)
            and tuple(_mark(spec, source) for spec, source in rows) == moment.marks
            and unchanged(moment.samples, now.sources)
        )


def _rows(flattened: Flattened, besides: Container[str]) -> Iterator[tuple[LeafSpec, Any]]:
    """The rows and their sources, but those of some entries of what is private. Shared ones come first."""
    for spec, source in zip(flattened.specs, flattened.sources, strict=True):
        if _entry(spec) not in besides:
            yield spec, source


def _entry(spec: LeafSpec) -> str:
    """The entry of what is private that a row is part of."""
    return spec.path.removeprefix(f"{PRIVATE}/").partition("/")[0] if spec.private else ""


def _entries(flattened: Flattened, besides: Container[str]) -> list[tuple[Any, Json]]:
    """What is private and plain."""
    return [pair for pair in items(flattened.private["v"]) if pair[0] not in besides]


def _mark(spec: LeafSpec, source: Any) -> Any:
    """What changes when a source does: the count that a tensor keeps of its changes, or the bytes themselves. A
    position's are made anew each time, so that their memory says nothing."""
    if counts_changes(source) and _entry(spec) != DATA:
        return (source.data_ptr(), source._version)
    return _content(source)


def _content(source: Any) -> Any:
    on_host = source.detach().cpu() if hasattr(source, "detach") else source
    try:
        return digest(np.ascontiguousarray(on_host).tobytes())
    except TypeError:  # a dtype that numpy does not know
        return str(on_host.tolist())
