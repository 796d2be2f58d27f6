"""Save triggers: the end of training, a signal, a metric that improved or dropped."""

from __future__ import annotations

from typing import Literal

from tenuto.policy.numbers import margin, metric_name
from tenuto.policy.save import OnDrop, OnEnd, OnImprove, OnSignal, SavePolicy


def end() -> SavePolicy:
    """Saves the last step: when the loop ends, and on `stop()`."""
    return OnEnd()


def signal() -> SavePolicy:
    """Saves when SIGTERM, SIGHUP, SIGUSR1 or (outside notebooks) SIGINT asks this process to stop."""
    return OnSignal()


def improve(metric: str, mode: Literal["min", "max"] | None = None, by: float | str = 0) -> SavePolicy:
    """Saves when `metric` is better than at every earlier save: lower, or higher with `mode="max"`.

    mode: without one, what `keep.best` takes for the metric's name.
    by: the required improvement, an amount or a fraction of the best value (`by="5%"`).

    Earlier saves are those of this line of training that have the metric, including those before a resume, as far as
    their checkpoints still exist (`keep.best` keeps the best of them). If none has it, the first value saves. NaN never
    improves, and nothing improves on it.

    A metric logged after its step, such as one of an epoch, saves that step's state while it can still be saved: at the
    epoch's end; after the loop, or in a loop of your own, at once if the state has not changed since. (To detect
    changes, a loop of your own is checked after each step that has not logged the metric itself: microseconds for each
    tensor, and a digest of each numpy array.) A step that is saved already gets the metric noted, and counts from then
    on.
    """
    name = metric_name(metric, 'on.improve("val_loss")')
    chosen = margin(by, f"on.improve({name!r}, by={{}})", least="zero")
    return OnImprove.of(name, mode, chosen)


def drop(metric: str, by: float | str) -> SavePolicy:
    """Saves when `metric` is lower, by at least `by`, than at the last save that has it.

    by: an amount, or a fraction of the value at that save (`by="5%"`).

    Unlike `improve`, this compares with the last save alone, even one with a higher value than those before. If no save
    has the metric, the first value saves. NaN is ignored. Late metrics and resumed runs work as in `improve`.
    """
    name = metric_name(metric, 'on.drop("loss", by="5%")')
    return OnDrop(name, margin(by, f"on.drop({name!r}, by={{}})", least="above zero"))
