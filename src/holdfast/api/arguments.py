"""The arguments of a Checkpointer, checked before anything is touched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast, get_args

from holdfast.errors import UsageError
from holdfast.plan.assign import Strategy
from holdfast.policy import every, on
from holdfast.policy import keep as keeping
from holdfast.policy.keeping import KeepPolicy
from holdfast.policy.pace import EveryStall
from holdfast.policy.saving import SavePolicy, parts_of


def policies(
    state: object, save: object, keep: object, *, on_busy: object, on_error: object, memory_budget: object
) -> tuple[SavePolicy, KeepPolicy]:
    """When to save and what to keep, the defaults where nothing was given. UsageError for what makes no sense."""
    if not isinstance(state, Mapping):
        raise UsageError(
            f"state must be a mapping of names to what is to be saved, not {type(state).__name__}",
            subject="state",
            hint='write {"model": model, "optimizer": optimizer}',
        )
    policy = save if save is not None else every(minutes=10) | on.end() | on.signal()
    kept = keep if keep is not None else keeping.latest(3)
    if not isinstance(policy, SavePolicy):
        raise UsageError(
            f"save={save!r} does not say when to save", subject="save", hint="save=every(steps=200) | on.end()"
        )
    if not isinstance(kept, KeepPolicy):
        raise UsageError(
            f"keep={keep!r} does not say what to keep",
            subject="keep",
            hint='keep=keep.latest(3) | keep.best(2, "val_loss")',
        )
    if on_busy not in ("wait", "skip"):
        raise UsageError(f"on_busy={on_busy!r} is neither 'wait' nor 'skip'", subject="on_busy", hint='on_busy="wait"')
    if on_error not in ("warn", "raise"):
        raise UsageError(
            f"on_error={on_error!r} is neither 'warn' nor 'raise'", subject="on_error", hint='on_error="warn"'
        )
    if memory_budget is not None and (
        isinstance(memory_budget, bool) or not isinstance(memory_budget, int) or memory_budget <= 0
    ):
        raise UsageError(
            f"memory_budget={memory_budget!r} is no number of bytes",
            subject="memory_budget",
            hint="memory_budget=8 * 2**30",
        )
    return policy, kept


def memory_policy(memory: object) -> SavePolicy | None:
    """When states are kept in memory. UsageError for what does not say when, or goes by a metric or by saves' cost."""
    if memory is None:
        return None
    if not isinstance(memory, SavePolicy):
        raise UsageError(
            f"memory={memory!r} does not say when to keep the state in memory",
            subject="memory",
            hint="memory=every(steps=1)",
        )
    if memory.metrics():
        raise UsageError(
            f"memory={memory!r} goes by a metric; what is kept in memory is the newest state, not the best",
            subject="memory",
            hint="memory=every(steps=1), and save=... | on.improve(...) for the store",
        )
    if any(isinstance(part, EveryStall) for part in parts_of(memory)):
        raise UsageError(
            f"memory={memory!r} goes by what saves to the store cost, which tells nothing of a state in memory",
            subject="memory",
            hint="memory=every(steps=10) or every(minutes=1), and save=every(stall=...) for the store",
        )
    return memory


def fenced(capture: object) -> bool:
    """Whether `capture=` asks for a fence. UsageError for what it cannot be."""
    if capture not in ("eager", "fenced"):
        raise UsageError(
            f"capture={capture!r} is neither 'eager' nor 'fenced'", subject="capture", hint='capture="fenced"'
        )
    return capture == "fenced"


def strategy(writers: object) -> Strategy:
    """By which ranks share out what several of them hold. UsageError for what `writers=` cannot be."""
    known = get_args(Strategy)
    if writers not in known:
        raise UsageError(
            f"writers={writers!r} is none of {', '.join(map(repr, known))}",
            subject="writers",
            hint='writers="balanced"',
        )
    return cast("Strategy", writers)


def count(value: object, what: str, least: int = 0) -> int:
    """`value` as a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(
            f"{what} takes a whole number of at least {least}, not {value!r}",
            subject=what,
            hint=f"give a plain int, such as {max(least, 1)}",
        )
    return value


def seconds(value: object, what: str) -> float:
    """`value` as a span of time above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UsageError(
            f"{what} takes a number of seconds above 0, not {value!r}",
            subject=what,
            hint="give seconds, such as 60",
        )
    return float(value)
