"""What the flow asks of a framework: sources, sinks, and a device that copies.

An adapter (one per framework, loaded when a value of that framework is met) implements these; the flow itself never
imports a framework.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tenuto.model.box import Box
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import Json
from tenuto.state.restore.unmatched import Unmatched

Buffer = np.ndarray[Any, np.dtype[np.uint8]]


class Bound(Protocol):
    """Destinations of one capture, made once per structure and arena, and used again at each save."""

    def copy(self, sources: Sequence[Any], start: int, stop: int) -> None:
        """Copies leaves `start..stop-1` (in the order of `bind`) from `sources`; done when `wait` has returned."""
        ...

    def copy_part(self, source: Any, leaf: int, start: int, stop: int) -> None:
        """Copies bytes `start..stop-1` (multiples of the item size) of one leaf that `splits` allows."""
        ...

    def splits(self, source: Any) -> bool:
        """Whether `copy_part` can serve this source: contiguous in host memory."""
        ...

    def wait(self) -> None:
        """Returns when everything copied so far is in the destinations."""
        ...


class Device(Protocol):
    """Copies leaves of one framework into host memory."""

    name: str

    def bind(self, specs: Sequence[LeafSpec], views: Sequence[Buffer]) -> Bound:
        """Prepares destinations: `views[i]` are the `specs[i].nbytes` bytes of leaf i in the image."""
        ...


@dataclass(frozen=True, slots=True)
class Flattened:
    """The training state as leaves, at one moment. Nothing is copied: `sources` still are the training's own tensors.

    Row i is what this rank holds of a leaf: `specs[i]` describes `sources[i]`, which `devices[device[i]]` can copy.
    Shared leaves first (numbered in the order
    in which `tree` names them), then the private ones of `private`. `fingerprint` is equal exactly when a plan, a
    layout and a `Bound` made for another Flattened can be used for this one.
    """

    tree: Json
    private: Json
    specs: tuple[LeafSpec, ...]
    sources: Sequence[Any]
    devices: tuple[Device, ...]
    device: Sequence[int]
    fingerprint: str
    reports: tuple[str, ...] = ()
    """What a person should know: overlapping storages stored each by itself, and the like."""
    leaf: Sequence[int] | None = None
    """The leaf number of each row, never falling; None: row i is leaf i. The leaves of `private` are numbered behind
    those of `tree`. A leaf may have several rows (boxes), or none: then this rank holds nothing of it."""
    shared: int | None = None
    """How many leaves `tree` names; None: as many as there are shared rows."""


class Sink(Protocol):
    """Where one leaf goes on restore."""

    @property
    def buffer(self) -> Buffer | None:
        """The destination's own bytes, where they are contiguous, writable host memory; else None."""
        ...

    def span(self) -> tuple[int, int] | None:
        """Address and length of what `buffer` would be, where telling them is cheaper; None: ask for `buffer`.

        For small leaves, of which there may be many. Valid while the sink is held.
        """
        ...

    def fill(self, data: Buffer) -> None:
        """Copies the leaf's bytes from `data` (used where `buffer` is None)."""
        ...


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What matched, by path."""

    restored: tuple[str, ...] = ()
    created: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """In the target, not in the checkpoint."""
    unexpected: tuple[str, ...] = ()
    """In the checkpoint inside an entry that the target names, not in the target."""
    skipped: tuple[str, ...] = ()
    """Top-level entries of the checkpoint that the target does not name, and leaves left out by include or exclude."""
    mismatched: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


Form = tuple[str, tuple[int, ...]]
"""Dtype name and shape of a leaf, the whole of it."""


@runtime_checkable
class Rows(Protocol):
    """Leaves that are held as columns, so that many need not each be an object."""

    @property
    def paths(self) -> Sequence[str]: ...

    @property
    def trees(self) -> tuple[Json, Json]:
        """The shared and the private tree whose leaves the paths are, in order: looked through already."""
        ...

    @property
    def shared(self) -> int:
        """How many of the leaves are those of the shared tree."""
        ...

    def forms(self) -> Sequence[Form]:
        """By leaf number."""
        ...


@dataclass(slots=True)
class Prepared:
    """A restore that has been matched but not begun: `wants` are leaf numbers and where their bytes go."""

    wants: Sequence[tuple[int, Sink]]
    apply: Callable[[], Any]
    """After every leaf has arrived: sets plain values, creates what did not exist, returns the state."""
    report: LoadReport = field(default_factory=LoadReport)
    """Once applied, with what modules that load in their own way made of what they were given."""
    boxes: Sequence[Box | None] | None = None
    """For each of `wants` the box of the leaf that its sink takes; None: the whole leaf. None for all: every want takes
    a whole leaf, of which then no other want takes anything."""
    left_over: Unmatched | None = None
    """Where other ranks have targets of their own: what this one does not take; None for nothing."""
    beside: tuple[int, Callable[[], None]] | None = None
    """A rank of those that have saved, and what reads some of what that one alone has; to be called once the wants are
    there."""


Rename = Mapping[str, str] | Callable[[str], str]
