"""The state as it goes into a save: the user's, this process's own, and what the manifest says about both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.api.environment import environment
from holdfast.api.position import Position
from holdfast.codec.digest import digest
from holdfast.engine.job import About
from holdfast.errors import HoldfastError
from holdfast.model.checkpoint import Json
from holdfast.model.names import CheckpointId
from holdfast.state.certificate import certificate, elsewhere
from holdfast.state.contract import Flattened
from holdfast.state.flattener import Flattener


@dataclass(frozen=True, slots=True)
class Moment:
    """A completed step that could still be saved, as long as nothing has touched the state since."""

    step: int
    flattened: Flattened
    versions: tuple[Any, ...]
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
        """What `untouched` compares with later; None where the state cannot be represented (the next save says so)."""
        try:
            flattened = self.now()
        except HoldfastError:
            return None
        return Moment(self._position.counters.step, flattened, _versions(flattened), self._position.progress())

    def untouched(self, moment: Moment) -> bool:
        """Whether every tensor and plain value of the state is as it was at `moment`, as far as tensors count their
        changes."""
        now = self.now()
        return (
            now.fingerprint == moment.flattened.fingerprint
            and now.tree == moment.flattened.tree
            and _versions(now) == moment.versions
        )

    def same_state(self, moment: Moment) -> bool:
        """Whether the user's state is as it was at `moment`. What evaluation may move on counts for nothing: random
        generators, and the position in the data.

        A tensor counts its changes, except what is done to it past torch: a fused optimizer's step, a write through
        `.data`.
        """
        now = self.now()
        shared = sum(not spec.private for spec in now.specs)
        return (
            shared == sum(not spec.private for spec in moment.flattened.specs)
            and now.specs[:shared] == moment.flattened.specs[:shared]
            and now.tree == moment.flattened.tree
            and _versions(now)[:shared] == moment.versions[:shared]
        )


def _versions(flattened: Flattened) -> tuple[Any, ...]:
    return tuple(
        _content(source) if spec.private and spec.dtype == "uint8" else _mark(source)
        for spec, source in zip(flattened.specs, flattened.sources, strict=True)
    )


def _mark(source: Any) -> Any:
    """What changes when a source does: the count that a tensor keeps of its changes, or the bytes themselves."""
    version = getattr(source, "_version", None)
    if version is not None and hasattr(source, "data_ptr"):
        return (source.data_ptr(), version)
    return _content(source)


def _content(source: Any) -> Any:
    """The bytes themselves: states of generators are captured anew each time, so that their memory says nothing."""
    on_host = source.cpu() if hasattr(source, "cpu") else source
    return digest(np.ascontiguousarray(on_host).tobytes())
