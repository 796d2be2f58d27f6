"""The end of a training: what is in flight is awaited, and what is left undone, or never will be done, is said."""

from __future__ import annotations

import time
import warnings

from holdfast.api.saving import Saving
from holdfast.errors import DeadlineExceeded
from holdfast.policy.saving import parts_of
from holdfast.policy.triggers import EveryEpochs


def await_saves(saving: Saving, until: float) -> None:
    """Waits for what is in flight, until this time of the monotonic clock at most. DeadlineExceeded, which the exit
    status tells of as well."""
    try:
        saving.wait(max(until - time.monotonic(), 0.0))
    except DeadlineExceeded as error:
        saving.hangs(error)
        raise


def say_what_is_left(saving: Saving, step: int, *, incomplete: bool, replaced: bool, left: bool) -> None:
    """What of a training is not saved. `step`: the last completed one; `incomplete`: one more was begun; `replaced`:
    `step` is not saved, for another Checkpointer came before anybody had said that training ended there; `left`: nor
    is it, for its loop was broken out of."""
    saving.warn_of_unlogged_metrics()
    last = saving.last
    known = f"the last checkpoint is step {last.step}" if last is not None and last.committed else ""
    known = known or "there is no checkpoint"
    if incomplete:
        message = f"holdfast: step {step + 1} was left incomplete and is not saved; {known}"
        warnings.warn(message, RuntimeWarning, stacklevel=5)
    elif replaced:
        saving.warn(
            f"step {step} is not saved ({known}): another Checkpointer of this process takes run {saving.run!r}, and "
            "no close() has said that training ended there"
        )
    elif left:
        saving.warn(
            f"step {step} is not saved ({known}): its loop was left before it came to its end; ckpt.stop() ends one "
            "and saves"
        )


def warn_of_epochs(saving: Saving) -> None:
    """Says, in a loop that does not tell where epochs end, that what asks there for saves never does."""
    for part in parts_of(saving.policy):
        if isinstance(part, EveryEpochs):
            saving.warn(f"{part!r} saves nothing here: only the loop of epochs() tells where one ends")
