"""Events that ask for a save: the end, a signal, a metric that got better or lower."""

from __future__ import annotations

from typing import Literal

from tenuto.policy.numbers import margin, metric_name, min_or_max
from tenuto.policy.save import OnDrop, OnEnd, OnImprove, OnSignal, SavePolicy


def end() -> SavePolicy:
    """Saves the last step: when the loop has come to its end, and on `stop()`."""
    return OnEnd()


def signal() -> SavePolicy:
    """Saves when SIGTERM, SIGUSR1 or (outside notebooks) SIGINT asks this process to leave."""
    return OnSignal()


def improve(metric: str, mode: Literal["min", "max"] = "min", by: float | str = 0) -> SavePolicy:
    """Saves when `metric` is better than at every save before: lower, or with `mode="max"` higher.

    Compared is with the saves of this line of training that have the metric, also those that a resumed run goes on
    from, as far as their checkpoints still exist (`keep.best` keeps the best of them). Where none has it, the first
    value saves. by: it has to be better by at least so much, an amount or a part of the best value (`by="5%"`).
    NaN never improves, and is never improved upon.

    A metric that is logged after its step, such as one of an epoch, saves that step's state where it can still be
    saved: at the epoch's end; after the loop, or in a loop of your own, at once if nothing has changed the state since.
    (To know that, a loop of your own is looked at after each step that has not logged the metric itself: microseconds
    a tensor, and a digest of each numpy array.) A step that is saved already gets the metric noted, and counts from
    then on.
    """
    name = metric_name(metric, 'on.improve("val_loss")')
    chosen = margin(by, f"on.improve({name!r}, by={{}})", least="zero")
    return OnImprove(name, min_or_max(mode, name), chosen)


def drop(metric: str, by: float | str) -> SavePolicy:
    """Saves when `metric` is lower than at the last save that has it, by at least `by`.

    by: an amount, or a part of the value at that save (`by="5%"`). Unlike `improve` this looks at the last save alone:
    after a save with a higher value it is that one which counts. Where no save has the metric, the first value saves.
    NaN is passed over. Late metrics, and a resumed run: as in `improve`.
    """
    name = metric_name(metric, 'on.drop("loss", by="5%")')
    return OnDrop(name, margin(by, f"on.drop({name!r}, by={{}})", least="above zero"))
