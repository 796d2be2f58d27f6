"""Work in the store that a training waits for, and not for ever: a store that hangs answers no timeout of its own.

The work goes on in its thread; whoever waited for it goes on without it, and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from holdfast.errors import DeadlineExceeded
from holdfast.state.parked import beside

Result = TypeVar("Result")


def within(seconds: float, what: str, work: Callable[[], Result], *, subject: str) -> Result:
    """What `work` returns or raises. DeadlineExceeded, naming `what`, if it has done neither after `seconds`.

    At the interpreter's end no thread can be started: then the work is done here, without a deadline.
    """
    ended: list[tuple[Result | None, BaseException | None]] = []

    def run() -> None:
        try:
            ended.append((work(), None))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            ended.append((None, error))

    try:
        under_way = beside.hand(run, f"holdfast-{what}")
    except RuntimeError:
        return work()
    under_way.join(max(0.0, seconds))
    if not ended:
        raise DeadlineExceeded(
            f"{what} has not ended within {seconds:g} s: the store does not answer",
            subject=subject,
            hint="look at the store: is it mounted, does `ls` there answer?",
        )
    result, error = ended[0]
    if error is not None:
        raise error
    return result  # type: ignore[return-value]
