"""Fenced saves: which leaves of a save are copied in the background, and what is learned from each."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Final, cast

from tenuto.crashpoints import crashpoint
from tenuto.engine.fence.fence import DEADLINE_S, CaptureTargets, CopyPace, Fence
from tenuto.engine.save.handle import Save, nothing
from tenuto.engine.staging.capture import Capturer
from tenuto.engine.staging.pack_content import Filling
from tenuto.engine.staging.plan import SavePlan
from tenuto.errors import DeadlineExceeded, SaveFailed, SaveTorn
from tenuto.events import Emitter, LeafDemoted, Warned
from tenuto.model.leaf import LeafSpec
from tenuto.state import update_barrier
from tenuto.state.contract import Flattened
from tenuto.state.update_barrier import CaptureChoice, LateBound, LeafHistory, UpdateGate, lower_barrier

Warn = Callable[[str], None]
WARNINGS = 5
"""Warnings about single leaves at a time; the events name all."""
CLOSE_S: Final = 30.0
"""How long the end of training waits for a copy in the background: the next process resumes from an image in memory."""
HINT = 'call ckpt.fence() before code that writes parameters or optimizer state itself, or pass capture="eager"'


class FencedCapture:
    """Captures the states of one run behind a fence, one at a time, whether they go to the store or into memory
    alone: what is learned from one kind counts for the other."""

    def __init__(self, gate: UpdateGate | None, emitter: Emitter, warn: Warn) -> None:
        self._gate = gate
        self._emitter = emitter
        self._warn = warn
        self._record = LeafHistory()
        self._pace = CopyPace()
        self._targets: weakref.WeakKeyDictionary[Capturer, CaptureTargets] = weakref.WeakKeyDictionary()
        self._current: Fence | None = None
        self._watch: _Watch | None = None
        """Of the current one."""
        self._window_reported = False
        self._uncopyable_reported = False
        self._fenceable: Sequence[int] = ()
        self._fingerprint = ""
        self._copyable: Sequence[tuple[int, str, int]] = ()
        self._pending_warnings: list[str] = []
        self.lock = threading.Lock()

    # -- between saves -------------------------------------------------------------------------------------------------

    def begin_save(self) -> None:
        """Ends the capture before, since a save is to be taken, fenced or not. DeadlineExceeded if it does not end."""
        if self._gate is not None:
            self._gate.begin_save()
        if self._watch is not None:
            self._watch.counts = False  # what is waited for here is the part of the save that begins
        self.release()
        self._settle()
        self._warn_pending()

    def release(self) -> None:
        """Returns when training's memory may change, by whatever means."""
        if self._current is not None:
            self._current.before_update()

    def flush(self) -> None:
        """Ends the pauses of the copy in flight: its end is awaited."""
        if self._current is not None:
            self._current.flush()

    def give_up(self) -> None:
        """Gives the image in flight up: when this returns nothing writes to it, and nothing waits for it.
        DeadlineExceeded if the copy does not end."""
        current, watch = self._current, self._watch
        if current is None or watch is None:
            return
        current.give_up()
        lower_barrier(current)
        try:
            self._settle()
        finally:
            watch.given_up()

    def close(self) -> None:
        """Copies to the end what is being copied. Then nothing writes to the image any more, nothing waits at a fence
        any more, and the hook is removed."""
        if self._current is not None:
            self._current.at_rest(CLOSE_S)
            self.give_up()
        if self._gate is not None:
            self._gate.close()
        self._warn_pending()

    def _settle(self) -> None:
        current = self._current
        if current is None:
            return
        if not current.at_rest(DEADLINE_S):
            raise DeadlineExceeded(
                f"the background copy of the save before has not ended within {DEADLINE_S:g} s",
                hint='capture="eager" copies before save() returns',
            )
        current.settle()
        if self._watch is not None:
            self._watch.settled()
        self._current = self._watch = None

    # -- one save ------------------------------------------------------------------------------------------------------

    def capture(self, flattened: Flattened, plan: SavePlan, save: Save, filling: Filling) -> None:
        """Copies what cannot wait, and begins to copy the rest in the background, which `filling` follows."""
        targets = self._targets.get(plan.capturer)
        if targets is None:
            targets = self._targets[plan.capturer] = CaptureTargets(plan.capturer)
        choice = self._choose(flattened, targets)
        watch = _Watch(self, flattened.specs, choice, save, filling)
        fence = Fence(flattened, choice, targets, watch, pace=self._pace, name=f"tenuto-fence-{save.step}")
        fence.report_time = save.clock.copied
        targets.capture_now(plan.capturer, flattened, save.save_id, choice)
        self._current, self._watch = fence, watch
        save.hasten = fence.flush
        try:
            fence.begin()
        except BaseException:
            self.give_up()  # no update may wait for a copy that nobody makes
            raise

    def possible(self, plan: SavePlan) -> bool:
        """Returns whether a state of this plan can be copied late at all; reports once why not."""
        if self._gate is None:
            return False
        if plan.arena.window is not None:
            if not self._window_reported:
                self._window_reported = True
                self.warn_once(
                    "the image does not fit into memory as a whole: its leaves are captured eagerly, piece by piece"
                )
            return False
        return True

    def _choose(self, flattened: Flattened, targets: CaptureTargets) -> CaptureChoice:
        assert self._gate is not None
        fenceable = self._gate.fenceable(flattened.sources)
        # The very same tensors may have another dtype or size by now: only the structure shows their lengths.
        if fenceable is not self._fenceable or flattened.fingerprint != self._fingerprint:
            self._fenceable, self._fingerprint = fenceable, flattened.fingerprint
            wanted, specs, sources = set(fenceable), flattened.specs, flattened.sources
            owned = [leaf for leaf in targets.order if leaf in wanted]
            waiting = {leaf for leaf in owned if cast(LateBound, targets.at[leaf][0]).can_wait(sources[leaf])}
            self._copyable = [(leaf, specs[leaf].path, targets.length[leaf]) for leaf in owned if leaf in waiting]
            long = [leaf for leaf in owned if targets.length[leaf] >= update_barrier.LEAST_BYTES]
            if not waiting.issuperset(long) and not self._uncopyable_reported:
                self._uncopyable_reported = True
                left_out = [specs[leaf].path for leaf in long if leaf not in waiting]
                self.warn_once(
                    f"{len(left_out)} of {len(long)} leaves that optimizers own are captured eagerly, {left_out[0]} "
                    "first: they are not contiguous, or lie on a device from which no parts are copied"
                )
        with self.lock:
            return self._record.choose(flattened.fingerprint, self._copyable)

    def demote(self, path: str, why: str) -> None:
        with self.lock:
            new = self._record.demote(path, why)
        if new:
            self._emitter.emit(LeafDemoted(path, why))
            self._pending_warnings.append(f"{path} is captured eagerly from now on: {why}")

    def _warn_pending(self) -> None:
        """Issues warnings at the next save, not at an update, which they must not fail where they become errors."""
        pending, self._pending_warnings = self._pending_warnings, []
        for message in pending[:WARNINGS]:
            self._warn(message)
        if len(pending) > WARNINGS:
            self._warn(f"{len(pending) - WARNINGS} more leaves are captured eagerly from now on, as events say")

    def compared(self, choice: CaptureChoice) -> None:
        with self.lock:
            self._record.passed(choice)

    def warn_once(self, message: str) -> None:
        self._emitter.emit(Warned(message))


class _Watch:
    """Follows one fenced capture, and reports its outcome."""

    def __init__(
        self, fencing: FencedCapture, specs: Sequence[LeafSpec], choice: CaptureChoice, save: Save, filling: Filling
    ) -> None:
        self._fencing = fencing
        self._specs = specs
        self._choice = choice
        self._save = save
        self._filling = filling
        self._torn: SaveTorn | None = None
        self._ended = False
        self.counts = True
        """Whether updates wait for it, and not the save after it."""

    def progressed(self, position: int) -> None:
        if not self._ended:
            crashpoint("image being copied beside training")
        self._filling.advance(position)

    def torn(self, leaf: int, why: str) -> None:
        path = self._specs[leaf].path
        if self._torn is None:
            self._torn = SaveTorn(f"the image of {self._save.id} is torn at {path}: {why}", subject=path, hint=HINT)
        self._fencing.demote(path, why)

    def differs(self, leaf: int) -> None:
        self._fencing.demote(
            self._specs[leaf].path, "something other than an optimizer's step changes it before the update"
        )

    def compared(self) -> None:
        self._fencing.compared(self._choice)

    def passed(self, seconds: float) -> None:
        if self.counts:
            self._save.fence_s += seconds

    def settled(self) -> None:
        """Drops the fence, since nothing is left to be copied or compared: a handle must keep no image mapped."""
        self._save.hasten = nothing

    def given_up(self) -> None:
        """Fails the capture for those that wait for the rest of it: nobody copies any more."""
        if not self._ended:
            message = f"the capture of {self._save.id} in the background was given up"
            self._filling.fail(SaveFailed(message, subject=str(self._save.id)))

    def ended(self, failure: BaseException | None) -> None:
        self._ended = True
        if failure is not None:
            message = f"the capture of {self._save.id} in the background failed: {failure!r}"
            self._filling.fail(SaveFailed(message, subject=str(self._save.id)))
            self._fencing.warn_once(message)
        elif self._torn is not None:
            self._filling.fail(self._torn)
        else:
            self._save.state = "writing"
