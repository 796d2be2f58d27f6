"""The contract between the engine and a framework: sources, sinks, and a device that copies.

One adapter per framework implements it, loaded when a value of that framework appears. The engine never imports a
framework.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from tenuto.model.leaf import Box, LeafSpec
from tenuto.model.records import Json
from tenuto.record import record

if TYPE_CHECKING:
    from tenuto.state.restore.match import Unmatched

Buffer = np.ndarray[Any, np.dtype[np.uint8]]
Places = np.ndarray[Any, np.dtype[np.int64]]


class Bound(Protocol):
    """Destinations of one capture, made once per structure and arena and reused by each save."""

    def copy(self, sources: Sequence[Any], start: int, stop: int) -> None:
        """Starts copying leaves `start..stop-1` (in the order of `bind`) from `sources`. `wait` completes it."""
        ...

    def copy_part(self, source: Any, leaf: int, start: int, stop: int) -> None:
        """Copies bytes `start..stop-1` (multiples of the item size) of one leaf that `splits` allows."""
        ...

    def splits(self, source: Any) -> bool:
        """Returns whether `copy_part` accepts this source: contiguous in host memory."""
        ...

    def wait(self) -> None:
        """Blocks until everything copied so far is in the destinations."""
        ...


class Device(Protocol):
    """Copies leaves of one framework into host memory."""

    name: str

    def bind(self, specs: Sequence[LeafSpec], views: Sequence[Buffer], *, stays: bool = True) -> Bound:
        """Prepares destinations: `views[i]` holds the `specs[i].nbytes` bytes of leaf i in the image. `stays`: whether
        the same memory is at these addresses until the end; that of a window is not, and no driver may be told of it.
        """
        ...


@record
class Flattened:
    """The training state as leaves, at one moment. Copies nothing: `sources` are the training's own tensors.

    Row i is this rank's part of a leaf: `specs[i]` describes `sources[i]`, which `devices[device[i]]` can copy. Shared
    leaves come first, numbered in the order of `tree`, then those of `private`. Two states have equal `fingerprint`
    exactly if they can share a plan, a layout and a `Bound`.
    """

    tree: Json
    private: Json
    specs: tuple[LeafSpec, ...]
    sources: Sequence[Any]
    devices: tuple[Device, ...]
    device: Sequence[int]
    fingerprint: str
    reports: tuple[str, ...] = ()
    """Remarks for the user, such as overlapping storages that are stored separately."""
    leaf: Sequence[int] | None = None
    """The leaf number of each row, ascending; None: row i is leaf i. The leaves of `private` are numbered after those
    of `tree`. A leaf may have several rows (boxes), or none where this rank has no part of it."""
    shared: int | None = None
    """The number of leaves in `tree`; None: the number of shared rows."""
    in_home: frozenset[int] = frozenset()
    """Rows that go into a pack of their own, which the home has too where other packs lie on nodes."""


class Sink(Protocol):
    """The destination of one leaf on restore."""

    @property
    def buffer(self) -> Buffer | None:
        """The destination's own bytes if they are contiguous, writable host memory; else None."""
        ...

    def span(self) -> tuple[int, int] | None:
        """Returns address and length of `buffer` where that is cheaper, as for many small leaves; None: use `buffer`.

        Valid while the sink is alive.
        """
        ...

    def fill(self, data: Buffer) -> None:
        """Copies the leaf's bytes from `data` (used where `buffer` is None)."""
        ...

    @property
    def fill_part(self) -> Callable[[int, Buffer], None] | None:
        """Copies some of the leaf's bytes, those from the given one on, from any thread. Used where `buffer` is None;
        where this is None too, the leaf is collected in memory of the reader's and filled as a whole."""
        ...


class Memory(Sink, Protocol):
    """A sink whose destination is the target's own memory, with values that a refused load puts back."""

    @property
    def nbytes(self) -> int: ...

    def keep(self) -> Callable[[], Any]:
        """Copies what is there, and returns what puts it back."""
        ...


@record
class LoadReport:
    """The result of matching a checkpoint with a target, by path."""

    restored: tuple[str, ...] = ()
    created: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """In the target, not in the checkpoint."""
    unexpected: tuple[str, ...] = ()
    """Not in the target, but in an entry of the checkpoint that the target names."""
    skipped: tuple[str, ...] = ()
    """Entries of the checkpoint that the target does not name, and leaves left out by include or exclude."""
    mismatched: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    """Settings of optimizers that the target has otherwise, and no schedule explains: the checkpoint's and its own."""


@record
class LateRead:
    """`needs`: returns what `read` reads: by the name of a pack ranges of it, each from and to, in whole chunks."""

    needs: Callable[[], Mapping[str, tuple[Places, Places]]]
    read: Callable[[], None]


Form = tuple[str, tuple[int, ...]]
"""Dtype name and full shape of a leaf."""


@runtime_checkable
class Rows(Protocol):
    """Leaves stored as columns, so that many need no object each."""

    @property
    def paths(self) -> Sequence[str]: ...

    @property
    def trees(self) -> tuple[Json, Json]:
        """The shared and the private tree whose leaves `paths` lists in order; already checked."""
        ...

    @property
    def shared(self) -> int:
        """The number of leaves of the shared tree."""
        ...

    def forms(self) -> Sequence[Form]:
        """Returns the forms by leaf number."""
        ...


@dataclass(slots=True)
class Prepared:
    """A restore that is matched and not begun. `wants`: leaf numbers and the destinations of their bytes."""

    wants: Sequence[tuple[int, Sink]]
    apply: Callable[[], Any]
    """Called after every leaf has arrived: sets plain values, creates what is new, returns the state."""
    report: LoadReport = field(default_factory=LoadReport)
    """After `apply`, includes what modules with a load of their own made of their state."""
    boxes: Sequence[Box | None] | None = None
    """For each of `wants` the box its sink takes; None: the full leaf. None for all: every want takes a full leaf, and
    each leaf is wanted once."""
    unmatched: Unmatched | None = None
    """If other ranks have targets of their own: what this one does not take; None for nothing."""
    other_rank: LateRead | None = None
    """What only another rank of the save has; read once the wants have arrived."""


Rename = Mapping[str, str] | Callable[[str], str]
