"""Numbers in the state that look like counts and do not count: `{"epoch": 0}`, the habit of `torch.save`.

A number is saved as it is when a save is taken, and nothing but the user's own assignment changes it. Only names that
cannot mean anything else are looked at, and only where training has moved on by far more than such a count may lag
behind: a constant of the configuration is never complained about. Inside another mapping a count of steps is one only
while it is 0, since `{"step": 30}` may be when a schedule changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

EPOCHS: Final = frozenset({"epoch", "current_epoch", "cur_epoch"})
STEPS: Final = frozenset({"step", "global_step", "current_step", "iteration", "iter", "global_iter"})
LEAST_EPOCHS: Final = 2
"""Completed epochs between two saves: within one epoch, its number stays."""
LEAST_STEPS: Final = 100
"""Completed steps between two saves: updates may be counted, of several batches each."""


@dataclass(frozen=True, slots=True)
class _Seen:
    value: Any
    step: int
    epoch: int


class StaleCounts:
    """Compares the counts in one state from save to save, until each was seen to change."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._waiting: dict[tuple[str, ...], _Seen | None] = {
            keys: None
            for keys, value in _entries(state)
            if keys[-1] in EPOCHS | STEPS and type(value) in (int, float)
            if len(keys) == 1 or keys[-1] in EPOCHS or value == 0
        }

    def check(self, step: int, epoch: int) -> str | None:
        """Returns a warning about a count that has not changed since an earlier save, though training has; each once.
        `step` and `epoch`: how many are completed."""
        if not self._waiting:
            return None
        values = dict(_entries(self._state))
        for keys, seen in list(self._waiting.items()):
            value = values.get(keys)
            if seen is None:
                self._waiting[keys] = _Seen(value, step, epoch)
            elif type(value) is not type(seen.value) or value != seen.value:
                del self._waiting[keys]
            elif words := _passed(keys[-1], step - seen.step, epoch - seen.epoch):
                del self._waiting[keys]
                return _warning(keys, value, words)
        return None


def _entries(state: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in state.items():
        yield (name,), value
        if type(value) is dict:
            yield from (((name, inner), one) for inner, one in value.items() if isinstance(inner, str))


def _passed(name: str, steps: int, epochs: int) -> str:
    if name in EPOCHS:
        return f"{epochs} epochs" if epochs >= LEAST_EPOCHS else ""
    return f"{steps} steps" if steps >= LEAST_STEPS else ""


def _warning(keys: tuple[str, ...], value: Any, passed: str) -> str:
    entry = "state" + "".join(f"[{key!r}]" for key in keys)
    count = "ckpt.epoch" if keys[-1] in EPOCHS else "ckpt.step"
    return (
        f"{entry} is {value!r} as it was {passed} ago: a number is saved as it is, and nothing counts it. Leave it out "
        f"and read {count}, assign {entry} = … in the mapping that you passed, or keep it in an object with state_dict"
    )
