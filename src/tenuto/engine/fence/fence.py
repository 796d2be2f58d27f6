"""Fenced capture: leaves that only an update changes are copied after `save` has returned, and the update waits.

One thread copies them in image order, in slices that do not hold the interpreter, so that digests and writes follow it.
Before the next update the fence is passed: what is not copied yet is copied without a pause, and what was copied at the
save to be watched is compared with training's memory. The writer gets the image's last slice only once every check has
passed, so nothing that failed one can be committed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, cast

from tenuto.concurrency.interruption import Latch, undisturbed
from tenuto.concurrency.worker_threads import BackgroundWork, foreground_threads
from tenuto.engine.staging.capture import Capturer
from tenuto.state import update_barrier
from tenuto.state.contract import Bound, Flattened
from tenuto.state.update_barrier import (
    CaptureChoice,
    LateBound,
    LateCopies,
    LateLeaf,
    Probe,
    Span,
    lower_barrier,
    raise_barrier,
)

# --------------------------------------------------------------------------------------------------
# Where each leaf of a capture goes: for captures that copy some of them at once and others later.


class CaptureTargets:
    """Where the leaves of one capturer go, made once for it. Refers neither to it nor to its memory as a whole."""

    def __init__(self, capturer: Capturer) -> None:
        self.nbytes = capturer.layout.nbytes
        self.order = capturer.layout.order.tolist()
        self.length = capturer.layout.length.tolist()
        self.begin = capturer.layout.start.tolist()
        self.at: dict[int, tuple[Bound, int]] = {
            leaf: (bound, row) for leaves, bound in capturer.groups() for row, leaf in enumerate(leaves)
        }

    def capture_now(self, capturer: Capturer, flattened: Flattened, save_id: str, choice: CaptureChoice) -> None:
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
    """Returns the runs of rows that are not late."""
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


DEADLINE_S: Final = 120.0
"""How long an update waits for a copy. After that the save is given up and training continues."""
UNCOUNTED: Final = "it was changed while it was being copied, by what no count of changes shows"
MOST_SPARE_S: Final = 60.0
"""The longest time that copies are spread over: after an evaluation of an hour the next state must not take half an
hour."""


class Observer(Protocol):
    """Is notified of the course of a fenced capture, by the copying thread or by the one that updates."""

    def progressed(self, position: int) -> None:
        """Notes that the image is complete below `position`."""
        ...

    def torn(self, leaf: int, why: str) -> None:
        """Notes that the image of this leaf may have bytes of two states."""
        ...

    def differs(self, leaf: int) -> None:
        """Notes that the image is right, but something other than an update has written the leaf since."""
        ...

    def compared(self) -> None:
        """Notes that everything watched has been compared just before an update."""
        ...

    def passed(self, seconds: float) -> None:
        """Notes that the update may begin, after it has waited for `seconds`."""
        ...

    def ended(self, failure: BaseException | None) -> None:
        """Notes that the copies are done. After `torn`, or with a failure, the image is unusable."""
        ...


@dataclass(slots=True)
class CopyPace:
    """How long the copies may take, learned from the time between the save before and its update."""

    share: float = 0.5
    spare_s: float = 0.0

    def learn(self, seconds: float) -> None:
        self.spare_s = min(self.share * seconds, MOST_SPARE_S)

    def delay(self, begun_s: float, done: float) -> float:
        """Returns the seconds to pause when the fraction `done` is copied."""
        return begun_s + self.spare_s * done - time.monotonic()


@dataclass(slots=True, eq=False)
class _Slice:
    """Bytes `start..stop-1` of a leaf."""

    leaf: int
    start: int
    stop: int
    position: int
    """In the image, of its first byte."""
    bound: LateBound
    source: LateLeaf
    copies: LateCopies | None = None
    number: int = 0
    judged: bool = False


class Fence:
    """The capture of one save, from what is copied at once until its update may come.

    The constructor refers to the leaves as they are now and reads their versions; `begin` starts the copying, and from
    then on updates wait.
    """

    def __init__(
        self,
        flattened: Flattened,
        choice: CaptureChoice,
        targets: CaptureTargets,
        observer: Observer,
        *,
        pace: CopyPace,
        name: str,
    ) -> None:
        self._choice = choice
        self._targets = targets
        self._observer = observer
        self._pace = pace
        self._begun_s = time.monotonic()
        self._sources: dict[int, tuple[Any, int]] = {}
        for span in (*choice.late, *choice.watched):
            if span.leaf not in self._sources:
                bound = cast(LateBound, targets.at[span.leaf][0])
                source = bound.hold(flattened.sources[span.leaf])
                self._sources[span.leaf] = (source, bound.version(source))
        self._read: dict[int, Probe] = {}
        """The probes of each destination, by its id."""
        self._probes = self._take_probes()
        self._late: list[_Slice] | None = None
        self._copies: list[tuple[LateCopies, list[int]]] = []
        """The copies of each device, and the leaves of the slices that are watched there."""
        self._flushed = Latch()
        self._copied = Latch()
        self._judging = threading.Lock()
        self._passing = threading.RLock()
        self._open = False
        self._given_up = False
        self._judged_again = False
        self._torn = False
        self._updating = False
        """Whether an update waits here: then nothing else changes, and what is compared now need not be again."""
        self._compared = False
        self._to_report = False
        self._verdicts: list[tuple[list[int], Callable[[], Sequence[bool]]]] = []
        self._name = name
        self._work: BackgroundWork | None = None
        self.report_time: Callable[[float, float], None] = unreported
        """Called by the thread that copies, or compares instead, when it is done and before the image is complete, with
        the time the copy took and the processor time of that thread."""

    def _take_probes(self) -> dict[int, Callable[[], bool]]:
        """Returns for each late leaf what tells whether its probe is still as it is now."""
        lengths, turn = self._targets.length, self._choice.turn
        parts: dict[int, list[LateLeaf]] = {}
        leaves: dict[int, list[int]] = {}
        for leaf in {span.leaf for span in self._choice.late}:
            start = int(max(lengths[leaf] - update_barrier.PROBE_BYTES, 0) * turn)
            bound = id(self._targets.at[leaf][0])
            part = (self._sources[leaf][0], 0, start, min(start + update_barrier.PROBE_BYTES, lengths[leaf]))
            parts.setdefault(bound, []).append(part)
            leaves.setdefault(bound, []).append(leaf)
        found: dict[int, Callable[[], bool]] = {}
        for bound, own in leaves.items():
            same = self._read[bound] = cast(LateBound, self._targets.at[own[0]][0]).probe(parts[bound])
            found.update((leaf, partial(same, number)) for number, leaf in enumerate(own))
        return found

    def begin(self) -> None:
        if any(cast(LateBound, self._targets.at[leaf][0]).on_device for leaf in self._sources):
            self._late = self._prepare()  # a device queues its copies here, behind the work before them
        raise_barrier(self)
        if not self._choice.late:
            self._end(None)
        if self._choice.late or (self._choice.watched and self._late is None):
            began = time.perf_counter()
            self._work = foreground_threads.submit(
                (lambda: self._run(began)) if self._choice.late else self._compare_slices, self._name
            )

    # -- the thread that copies ----------------------------------------------------------------------------------------

    def _run(self, began: float) -> None:
        failure: BaseException | None = None
        began_cpu = time.thread_time()
        try:
            self._copy()
        except BaseException as error:  # noqa: BLE001 - a thread's exception would reach nobody; the save carries it
            failure = error
        self.report_time(time.perf_counter() - began, time.thread_time() - began_cpu)
        self._end(failure)

    def _end(self, failure: BaseException | None) -> None:
        with self._judging:
            given_up, torn = self._given_up, self._torn
        try:
            if not given_up:
                self._observer.ended(failure)
                if failure is None and not torn:
                    self._observer.progressed(self._targets.nbytes)
        finally:
            self._copied.set()
            self._drop_sources()

    def _prepare(self) -> list[_Slice]:
        parts = sorted(self._parts(self._choice.late), key=lambda part: part.position)
        watched = {id(bound): own for bound, own in _by_bound(self._parts(self._choice.watched))}
        for bound, own in _by_bound(parts):
            seen = watched.get(id(bound), [])
            read = self._read.get(id(bound))
            copies = bound.late([part.source for part in own], [part.source for part in seen], read)
            self._copies.append((copies, [part.leaf for part in seen]))
            for number, part in enumerate(own):
                part.copies, part.number = copies, number
        return parts

    def _copy(self) -> None:
        if self._late is None:
            self._late = self._prepare()
        parts = self._late
        for done, part in enumerate(parts):
            if not self._flushed.is_set() and (delay := self._pace.delay(self._begun_s, done / len(parts))) > 0:
                self._flushed.wait(delay)
            if self._given_up and not part.bound.on_device:
                return
            # Only what lies before is reported: the last slice is not, until everything has been judged.
            self._observer.progressed(part.position)
            assert part.copies is not None
            part.copies.copy(part.number)
            self._judge(part)
        self._check()

    def _compare_slices(self) -> None:
        """Compares the slices when they would be copied, for in the probation nothing is late. So code that changes a
        leaf and changes it back before the update is found as well."""
        began_cpu = time.thread_time()
        parts = sorted(self._parts(self._choice.watched), key=lambda part: part.position)
        try:
            for done, part in enumerate(parts):
                if (delay := self._pace.delay(self._begun_s, done / len(parts))) > 0:
                    self._flushed.wait(delay)
                if self._updating or self._given_up:
                    return
                if not part.bound.compare([part.source])()[0] and not self._given_up:
                    self._observer.differs(part.leaf)
        finally:
            self.report_time(0.0, time.thread_time() - began_cpu)

    def _check(self) -> None:
        """Finds what no count of changes shows: a watched slice that changed while its leaf was being copied. And what
        one shows too late: see `_judge_again`."""
        last = self._updating
        late = {span.leaf for span in self._choice.late}
        for copies, leaves in self._copies:
            for leaf, same in zip(leaves, copies.unchanged(), strict=True):
                if not same and leaf in late:
                    with self._judging:
                        self._is_torn(leaf, UNCOUNTED)
                elif not same:
                    self._observer.differs(leaf)  # it was copied as a whole at the save
        for leaf in sorted(late):
            if self._on_device(leaf) and not self._probes[leaf]():
                with self._judging:
                    self._is_torn(leaf, UNCOUNTED)
        self._compared = last
        self._judge_again()

    def _judge_again(self) -> None:
        """Judges all leaves again, once, when everything is copied or ordered before the update. An operation counts
        when it is done: one that writes while a slice is copied may count only after its leaf was judged."""
        with self._judging:
            if self._judged_again or self._given_up:
                return
            self._judged_again = True
            for leaf in dict.fromkeys(span.leaf for span in self._choice.late):
                source, version = self._sources[leaf]
                if cast(LateBound, self._targets.at[leaf][0]).version(source) != version:
                    self._is_torn(leaf, "it was changed in place while it was being copied, and by no optimizer's step")
                elif not self._on_device(leaf) and not self._probes[leaf]():
                    self._is_torn(leaf, UNCOUNTED)

    def _on_device(self, leaf: int) -> bool:
        """Returns whether the leaf's probe waits for a device. Only the thread that copies may."""
        return cast(LateBound, self._targets.at[leaf][0]).on_device

    def _judge(self, part: _Slice) -> None:
        """Finds whether its leaf was changed before it was copied, as far as the framework counts changes."""
        with self._judging:
            if not part.judged:
                part.judged = True
                source, version = self._sources[part.leaf]
                if part.bound.version(source) != version:
                    self._is_torn(part.leaf, "it was changed in place before it was copied, and by no optimizer's step")
                elif not part.bound.on_device and not self._probes[part.leaf]():
                    self._is_torn(part.leaf, UNCOUNTED)

    def _is_torn(self, leaf: int, why: str) -> None:
        self._torn = True
        self._observer.torn(leaf, why)

    # -- the thread that updates ---------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Ends the pauses: the copies are awaited."""
        self._flushed.set()

    @property
    def _passed(self) -> bool:
        """Whether updates may come; read again, since a signal's handler may pass while a thread waits here."""
        return self._open

    def before_update(self) -> None:
        """Returns when training's memory may change. What goes wrong fails the save, never the update."""
        with undisturbed, self._passing:  # two threads, or one that a signal's handler interrupts here
            if self._open:
                return
            begun = time.perf_counter()
            if not self._flushed.is_set():
                self._pace.learn(time.monotonic() - self._begun_s)
            self._updating = True
            self._flushed.set()
            try:
                self._await_copies()
                self._check_versions()
                self._compare()
            except Exception as error:  # noqa: BLE001 - reported, and the save given up; an update must not fail for it
                if not self._passed:
                    self.give_up()
                    self._observer.ended(error)
            if self._passed:
                return  # a signal's handler has passed the fence meanwhile, and dropped the sources
            self._open = True
            lower_barrier(self)
            self._drop_sources()
            self._observer.passed(time.perf_counter() - begun)

    def settle(self) -> None:
        """Waits for comparisons that run on a device, and reports what they found."""
        verdicts, self._verdicts = self._verdicts, []
        for leaves, verdict in verdicts:
            for leaf in dict.fromkeys(leaf for leaf, same in zip(leaves, verdict(), strict=True) if not same):
                self._observer.differs(leaf)
        if self._to_report:
            self._to_report = False
            self._observer.compared()

    def give_up(self) -> None:
        """Ends the copying with the present slice, since the image is not wanted any more. Copies that a device has
        queued are awaited: it writes to the image all the same."""
        with self._judging:
            self._given_up = True
        self._flushed.set()

    def at_rest(self, timeout: float) -> bool:
        """Returns whether nothing writes to the image any more, after at most `timeout` seconds."""
        self._flushed.set()
        if self._work is None:
            return True
        self._work.join(timeout)
        return not self._work.is_alive()

    def _await_copies(self) -> None:
        ways = [copies for copies, _ in self._copies] if self._late else []
        if ways and all(copies.order() for copies in ways):
            for part in self._late or ():
                self._judge(part)  # now: the update that comes is a change too
            self._judge_again()
        elif not (self._copied.wait(DEADLINE_S) and (self._choice.late or self.at_rest(DEADLINE_S))):
            self.give_up()
            self._observer.ended(TimeoutError(f"the copy in the background did not end within {DEADLINE_S:g} s"))

    def _check_versions(self) -> None:
        """Reports leaves that were changed after they were copied, which did no harm this time."""
        for leaf, (source, version) in self._sources.items():
            if cast(LateBound, self._targets.at[leaf][0]).version(source) != version:
                self._observer.differs(leaf)

    def _compare(self) -> None:
        if not self._choice.watched:
            return
        ways = _by_bound(self._parts(self._choice.watched))
        copied = {id(self._targets.at[span.leaf][0]) for span in self._choice.late}
        for bound, parts in ways:
            if bound.on_device or not (self._compared and id(bound) in copied):
                verdict = bound.compare([part.source for part in parts])
                self._verdicts.append(([part.leaf for part in parts], verdict))
        self._to_report = True
        if not any(bound.on_device for bound, _ in ways):
            self.settle()

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _parts(self, spans: Iterable[Span]) -> list[_Slice]:
        found: list[_Slice] = []
        for span in spans:
            place, row = self._targets.at[span.leaf]
            bound, source = cast(LateBound, place), self._sources[span.leaf][0]
            begin = self._targets.begin[span.leaf]
            for start in range(span.start, span.stop, bound.late_step):
                stop = min(start + bound.late_step, span.stop)
                late = (source, row, start, stop)
                found.append(_Slice(span.leaf, start, stop, begin + start, bound, late))
        return found

    def _drop_sources(self) -> None:
        """Drops the references to the state's memory, as soon as it is neither copied nor compared any more."""
        with self._judging:
            if self._open and self._copied.is_set():
                self._sources, self._probes, self._read, self._late, self._copies = {}, {}, {}, [], []


def unreported(late_s: float, cpu_s: float) -> None:
    """Reports the times to nobody."""


def _by_bound(parts: Iterable[_Slice]) -> list[tuple[LateBound, list[_Slice]]]:
    found: dict[int, tuple[LateBound, list[_Slice]]] = {}
    for part in parts:
        found.setdefault(id(part.bound), (part.bound, []))[1].append(part)
    return list(found.values())
