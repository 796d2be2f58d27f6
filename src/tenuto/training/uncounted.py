"""What a loop is told about epochs, batches and steps that are not counted as whoever wrote it may think."""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Final

from tenuto.policy.save import EveryEpochs, Moment, SaveHistory, parts_of
from tenuto.training.snapshot import UNCOUNTED
from tenuto.units import count, seconds

if TYPE_CHECKING:
    from tenuto.state.position.training_position import TrainingPosition
    from tenuto.training.saves import RunSaver
    from tenuto.training.training_session import TrainingSession

_COUNTED_FORMS: Final = (
    "Take them from ckpt.batches, inside ckpt.steps(n) or ckpt.epochs(n); in a loop of your own pass data that counts "
    "by itself and iterate that: tenuto.torch.resumable(loader), or anything with state_dict and load_state_dict"
)
_ONE_STEP: Final = (
    "the epoch took no batch from ckpt.batches and counts as one step: saves come at the end of an epoch, "
    "and every(steps=) counts epochs. `for batch in ckpt.batches` counts each batch"
)


def warn_of_epochs(saving: RunSaver) -> None:
    """Warns, in a loop that does not report the end of epochs, of policies that save there."""
    for part in parts_of(saving.policy):
        if isinstance(part, EveryEpochs):
            saving.warn(
                f"{part!r} saves nothing here: only the loop of epochs() knows where one ends, or "
                "one of your own that says ckpt.step_done(epoch_ended=…) after each step"
            )


class UncountedBatches:
    """Warns, once of each, of batches that a loop takes past the data of its Checkpointer."""

    def __init__(self, saving: RunSaver, position: TrainingPosition) -> None:
        self._saving = saving
        self._position = position
        self._told: set[str] = set()

    def warn(self) -> None:
        """Warns of a save where nothing counts the batches."""
        if self._position.uncounted:
            self._once(f"a resume is not exact: {UNCOUNTED}. {_COUNTED_FORMS}")

    def warn_of_one_step(self) -> None:
        """Warns of an epoch that took none of its batches from the data: none of them is a step."""
        self._once(_ONE_STEP)

    def _once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            self._saving.warn(message)


PATIENCE_S: Final = 600.0
"""How long a first step may take before it is told that nothing can be saved without one."""
LOOK_AGAIN_S: Final = 60.0
PATIENCE_BATCHES: Final = 1000
"""Batches, before the end of an epoch, of which the first step may consist."""
_SAY_SO: Final = "say ckpt.step_done() after each step, or loop over ckpt.steps(n) or ckpt.epochs(n)"
_BODY: Final = "a step ends where the body of its loop does: make one update in each"


class FirstSave:
    """Tells a training, once, that it has passed its first due save without one, because no step was completed.

    Time passes by itself, which a thread looks at; of batches that completed no step whoever owns the loop tells.
    """

    def __init__(self, session: TrainingSession) -> None:
        self._session = weakref.ref(session)  # a session that nobody holds is closed, and the thread ends
        self._began_s = time.monotonic()
        self._timer: threading.Timer | None = None
        self._batches = self._epochs = 0
        self._why = self._due = ""
        self._over = False

    def begin(self) -> None:
        """Begins to wait for the first step."""
        if self._timer is None and not self._over:
            self._began_s = time.monotonic()
            self._check_in(PATIENCE_S)

    def end(self, *, closed: bool = False) -> None:
        """Ends the waiting: a step is completed, or, with `closed`, training has ended without one, which it is told
        where batches were trained."""
        if closed and not self._over and self._batches:
            self._report("training has ended")
        self._over = True
        if self._timer is not None:
            self._timer.cancel()

    def batch(self, *, epoch_ended: bool, why: str) -> None:
        """Notes a batch that completed no step. `why`: why it did not, and what to do."""
        if self._over:
            return
        self._batches += 1
        self._epochs += epoch_ended
        self._why = why
        self._judge(epoch_ended=epoch_ended)
        if self._due and (epoch_ended or self._batches >= PATIENCE_BATCHES):
            self._report(f"a save was due ({self._due})")

    def _check_in(self, wait_s: float) -> None:
        self._timer = timer = threading.Timer(wait_s, self._check)
        timer.name, timer.daemon = "tenuto-first-save", True
        timer.start()

    def _check(self) -> None:
        self._judge()
        if self._due:
            self._report(f"a save was due ({self._due})")
        elif not self._over and self._session() is not None:
            self._check_in(LOOK_AGAIN_S)

    def _judge(self, *, epoch_ended: bool = False) -> None:
        """Asks the policy whether it would save now, had each batch been a step."""
        session = self._session()
        if session is not None and not self._due:
            step = max(self._batches, 1)
            moment = Moment(step, time.monotonic(), self._epochs or None, epoch_ended)
            decision = session.saving.policy.decide(moment, SaveHistory(self._began_s))
            self._due = decision.reason if decision.save else ""

    def _report(self, due: str) -> None:
        session = self._session()
        if session is None or not session.saving.group.coordinates:
            return
        self._over = True
        passed = f"{count(self._batches, 'batch')} and " if self._batches else ""
        why = self._why or (_SAY_SO if session.loop is None else _BODY)
        session.saving.report(
            f"nothing is saved, though {due}: {passed}{seconds(time.monotonic() - self._began_s)} of training have "
            f"completed no step. {why}"
        )
