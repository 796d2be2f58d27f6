"""Fenced capture: leaves that only an update changes are copied after `save` has returned, and the update waits.

One thread copies them in image order, in slices that do not hold the interpreter, so that digests and writes follow it.
Before the next update the fence is passed: what is not copied yet is copied without a pause, and what was copied at the
save to be watched is compared with training's memory. The image's last slice is kept from the writer until everything
is known to be right, so nothing that failed a check can be committed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

from tenuto.concurrency.worker_threads import BackgroundWork, foreground_threads
from tenuto.engine.staging.capture import Capturer
from tenuto.state.contract import Bound, Flattened
from tenuto.state.update_barrier import (
    CaptureChoice,
    LateBound,
    LateCopies,
    LateLeaf,
    Span,
    lower_barrier,
    raise_barrier,
)

# --------------------------------------------------------------------------------------------------
# Where the leaves of a capture go, one by one: for captures that copy some of them at once and others later.


class CaptureTargets:
    """Where the leaves of one capturer go: made once for it. Does not hold it, nor its memory as a whole."""

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


DEADLINE_S: Final = 120.0
"""How long an update waits for a copy. Beyond that the save is given up and training goes on."""
MOST_SPARE_S: Final = 60.0
"""The longest that copies are spread over: after an evaluation of an hour the next state is not to come in half an
hour."""


class Observer(Protocol):
    """What becomes of a fenced capture. Called from the copying thread, or from the one that updates."""

    def progressed(self, position: int) -> None:
        """The image is complete below `position`."""
        ...

    def torn(self, leaf: int, why: str) -> None:
        """The image of this leaf may hold bytes of two moments."""
        ...

    def differs(self, leaf: int) -> None:
        """The image is right; but something other than an update has written the leaf since."""
        ...

    def compared(self) -> None:
        """What was watched has been compared with what it was just before an update."""
        ...

    def passed(self, seconds: float) -> None:
        """The update may come; it was held for so long."""
        ...

    def ended(self, failure: BaseException | None) -> None:
        """The copies are done. After `torn`, or with a failure, the image is no good."""
        ...


@dataclass(slots=True)
class CopyPace:
    """How long the copies may take, learned from how long the save before had until its update."""

    share: float = 0.5
    spare_s: float = 0.0

    def learn(self, seconds: float) -> None:
        self.spare_s = min(self.share * seconds, MOST_SPARE_S)

    def delay(self, begun_s: float, done: float) -> float:
        """Seconds to pause when the fraction `done` is copied."""
        return begun_s + self.spare_s * done - time.monotonic()


@dataclass(slots=True, eq=False)
class _Slice:
    """Bytes `start..stop-1` of a leaf, at most a slice of them."""

    leaf: int
    start: int
    stop: int
    position: int
    """In the image, of its first byte."""
    bound: LateBound
    told: LateLeaf
    copies: LateCopies | None = None
    number: int = 0
    judged: bool = False


class Fence:
    """The capture of one save, from what is copied at once until its update may come.

    The constructor holds the leaves as they are now and reads their versions; `begin` starts the copying, and from then
    on updates wait.
    """

    def __init__(
        self,
        flattened: Flattened,
        choice: CaptureChoice,
        places: CaptureTargets,
        observer: Observer,
        *,
        pace: CopyPace,
        name: str,
    ) -> None:
        self._choice = choice
        self._places = places
        self._observer = observer
        self._pace = pace
        self._begun_s = time.monotonic()
        self._held: dict[int, tuple[Any, int]] = {}
        for span in (*choice.late, *choice.watched):
            if span.leaf not in self._held:
                bound = cast(LateBound, places.at[span.leaf][0])
                held = bound.hold(flattened.sources[span.leaf])
                self._held[span.leaf] = (held, bound.version(held))
        self._late: list[_Slice] | None = None
        self._ways: list[tuple[LateCopies, list[int]]] = []
        """The copies of each device, and the leaves of the parts that are watched there."""
        self._hurry = threading.Event()
        self._copied = threading.Event()
        self._judging = threading.Lock()
        self._passing = threading.RLock()
        self._open = False
        self._given_up = False
        self._judged_again = False
        self._torn = False
        self._updating = False
        """Whether an update waits here: then nothing else moves, and what is compared now need not be again."""
        self._compared = False
        self._to_count = False
        self._verdicts: list[tuple[list[int], Callable[[], Sequence[bool]]]] = []
        self._name = name
        self._work: BackgroundWork | None = None
        self.spent: Callable[[float, float], None] = unreported
        """Called by the thread that copies, or compares instead, when it is done and before the image is called whole:
        how long the copy took from its begin, and the processor time of that thread."""

    def begin(self) -> None:
        if any(cast(LateBound, self._places.at[leaf][0]).on_device for leaf in self._held):
            self._late = self._prepare()  # a device's copies are asked for here, behind the work that comes before
        raise_barrier(self)
        if not self._choice.late:
            self._end(None)
        if self._choice.late or (self._choice.watched and self._late is None):
            began = time.perf_counter()
            self._work = foreground_threads.submit(
                (lambda: self._run(began)) if self._choice.late else self._rehearse, self._name
            )

    # -- the thread that copies ----------------------------------------------------------------------------------------

    def _run(self, began: float) -> None:
        failure: BaseException | None = None
        began_cpu = time.thread_time()
        try:
            self._copy()
        except BaseException as error:  # noqa: BLE001 - a thread's exception would reach nobody; the save carries it
            failure = error
        self.spent(time.perf_counter() - began, time.thread_time() - began_cpu)
        self._end(failure)

    def _end(self, failure: BaseException | None) -> None:
        with self._judging:
            given_up, torn = self._given_up, self._torn
        try:
            if not given_up:
                self._observer.ended(failure)
                if failure is None and not torn:
                    self._observer.progressed(self._places.nbytes)
        finally:
            self._copied.set()
            self._let_go()

    def _prepare(self) -> list[_Slice]:
        parts = sorted(self._parts(self._choice.late), key=lambda part: part.position)
        watched = {id(bound): own for bound, own in _by_bound(self._parts(self._choice.watched))}
        for bound, own in _by_bound(parts):
            seen = watched.get(id(bound), [])
            copies = bound.late([part.told for part in own], [part.told for part in seen])
            self._ways.append((copies, [part.leaf for part in seen]))
            for number, part in enumerate(own):
                part.copies, part.number = copies, number
        return parts

    def _copy(self) -> None:
        if self._late is None:
            self._late = self._prepare()
        parts = self._late
        for done, part in enumerate(parts):
            if not self._hurry.is_set() and (delay := self._pace.delay(self._begun_s, done / len(parts))) > 0:
                self._hurry.wait(delay)
            if self._given_up and not part.bound.on_device:
                return
            # Only what lies before is told: the last part stays untold until everything has been judged.
            self._observer.progressed(part.position)
            assert part.copies is not None
            part.copies.copy(part.number)
            self._judge(part)
        self._check()

    def _rehearse(self) -> None:
        """In the probation nothing is late: the slices are compared when they would be copied. So who changes a leaf
        and changes it back before the update is met as well."""
        began_cpu = time.thread_time()
        parts = sorted(self._parts(self._choice.watched), key=lambda part: part.position)
        try:
            for done, part in enumerate(parts):
                if (delay := self._pace.delay(self._begun_s, done / len(parts))) > 0:
                    self._hurry.wait(delay)
                if self._updating or self._given_up:
                    return
                if not part.bound.compare([part.told])()[0] and not self._given_up:
                    self._observer.differs(part.leaf)
        finally:
            self.spent(0.0, time.thread_time() - began_cpu)

    def _check(self) -> None:
        """What no count of changes shows: a watched part that changed while its leaf was being copied. And what one
        shows too late: see `_judge_again`."""
        last = self._updating
        late = {span.leaf for span in self._choice.late}
        for copies, leaves in self._ways:
            for leaf, same in zip(leaves, copies.unchanged(), strict=True):
                if not same and leaf in late:
                    with self._judging:
                        self._is_torn(
                            leaf, "it was changed while it was being copied, by what no count of changes shows"
                        )
                elif not same:
                    self._observer.differs(leaf)  # it was copied as a whole at the save
        self._compared = last
        self._judge_again()

    def _judge_again(self) -> None:
        """An operation is counted when it is done: what writes while a part is copied may not be counted until after
        its leaf was judged. Once, when everything is copied or ordered before the update, whichever comes first."""
        with self._judging:
            if self._judged_again or self._given_up:
                return
            self._judged_again = True
            for leaf in dict.fromkeys(span.leaf for span in self._choice.late):
                held, version = self._held[leaf]
                if cast(LateBound, self._places.at[leaf][0]).version(held) != version:
                    self._is_torn(leaf, "it was changed in place while it was being copied, and by no optimizer's step")

    def _judge(self, part: _Slice) -> None:
        """Whether its leaf was changed before it was copied, as far as the framework counts changes."""
        with self._judging:
            if not part.judged:
                part.judged = True
                held, version = self._held[part.leaf]
                if part.bound.version(held) != version:
                    self._is_torn(part.leaf, "it was changed in place before it was copied, and by no optimizer's step")

    def _is_torn(self, leaf: int, why: str) -> None:
        self._torn = True
        self._observer.torn(leaf, why)

    # -- the thread that updates ---------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Somebody waits for the copies: no pauses any more."""
        self._hurry.set()

    @property
    def _passed(self) -> bool:
        """Asked anew: while a thread waits at the fence its signals' handlers run."""
        return self._open

    def before_update(self) -> None:
        """Returns when training's memory may change. What goes wrong fails the save, never the update."""
        with self._passing:  # two threads, or one that a signal's handler interrupts here
            if self._open:
                return
            begun = time.perf_counter()
            if not self._hurry.is_set():
                self._pace.learn(time.monotonic() - self._begun_s)
            self._updating = True
            self._hurry.set()
            try:
                self._let_copies_end()
                self._look_at_versions()
                self._compare()
            except Exception as error:  # noqa: BLE001 - it is told, and the save given up; an update must not end for it
                if not self._passed:
                    self.give_up()
                    self._observer.ended(error)
            if self._passed:
                return  # a signal's handler came by meanwhile, and has let go of what is looked at here
            self._open = True
            lower_barrier(self)
            self._let_go()
            self._observer.passed(time.perf_counter() - begun)

    def settle(self) -> None:
        """Waits for comparisons that run on a device, and tells what they found."""
        verdicts, self._verdicts = self._verdicts, []
        for leaves, verdict in verdicts:
            for leaf in dict.fromkeys(leaf for leaf, same in zip(leaves, verdict(), strict=True) if not same):
                self._observer.differs(leaf)
        if self._to_count:
            self._to_count = False
            self._observer.compared()

    def give_up(self) -> None:
        """The image is not wanted any more: the copying ends with the part that it is at. What a device was asked to
        copy is waited for: it writes to the image all the same."""
        with self._judging:
            self._given_up = True
        self._hurry.set()

    def at_rest(self, timeout: float) -> bool:
        """Whether nothing writes to the image any more, after at most `timeout` seconds."""
        self._hurry.set()
        if self._work is None:
            return True
        self._work.join(timeout)
        return not self._work.is_alive()

    def _let_copies_end(self) -> None:
        ways = [copies for copies, _ in self._ways] if self._late else []
        if ways and all(copies.order() for copies in ways):
            for part in self._late or ():
                self._judge(part)  # now: the update that comes is a change too
            self._judge_again()
        elif not (self._copied.wait(DEADLINE_S) and (self._choice.late or self.at_rest(DEADLINE_S))):
            self.give_up()
            self._observer.ended(TimeoutError(f"the copy beside training did not end within {DEADLINE_S:g} s"))

    def _look_at_versions(self) -> None:
        """What was changed after it was copied did no harm this time."""
        for leaf, (held, version) in self._held.items():
            if cast(LateBound, self._places.at[leaf][0]).version(held) != version:
                self._observer.differs(leaf)

    def _compare(self) -> None:
        if not self._choice.watched:
            return
        ways = _by_bound(self._parts(self._choice.watched))
        copied = {id(self._places.at[span.leaf][0]) for span in self._choice.late}
        for bound, parts in ways:
            if bound.on_device or not (self._compared and id(bound) in copied):
                verdict = bound.compare([part.told for part in parts])
                self._verdicts.append(([part.leaf for part in parts], verdict))
        self._to_count = True
        if not any(bound.on_device for bound, _ in ways):
            self.settle()

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _parts(self, spans: Iterable[Span]) -> list[_Slice]:
        found: list[_Slice] = []
        for span in spans:
            place, row = self._places.at[span.leaf]
            bound, held = cast(LateBound, place), self._held[span.leaf][0]
            begin = self._places.begin[span.leaf]
            for start in range(span.start, span.stop, bound.late_step):
                stop = min(start + bound.late_step, span.stop)
                told = (held, row, start, stop)
                found.append(_Slice(span.leaf, start, stop, begin + start, bound, told))
        return found

    def _let_go(self) -> None:
        """Memory that the state has replaced meanwhile is not held any longer than it must be."""
        with self._judging:
            if self._open and self._copied.is_set():
                self._held, self._late, self._ways = {}, [], []


def unreported(late_s: float, cpu_s: float) -> None:
    """Nobody wants to know."""


def _by_bound(parts: Iterable[_Slice]) -> list[tuple[LateBound, list[_Slice]]]:
    found: dict[int, tuple[LateBound, list[_Slice]]] = {}
    for part in parts:
        found.setdefault(id(part.bound), (part.bound, []))[1].append(part)
    return list(found.values())
