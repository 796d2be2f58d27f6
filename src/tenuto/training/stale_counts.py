"""What looks as if it were saved and never changes: numbers that look like counts and do not count, as
`{"epoch": 0}`, the habit of `torch.save`, and immutable arrays that nobody replaces.

A number is saved as it is when a save is taken, and nothing but the user's own assignment changes it. Only names that
cannot mean anything else are looked at, and only where training has moved on by far more than such a count may lag
behind: a constant of the configuration is never complained about. Inside another mapping a count of steps is one only
while it is 0, since `{"step": 30}` may be when a schedule changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from tenuto.record import record

EPOCHS: Final = frozenset({"epoch", "current_epoch", "cur_epoch"})
STEPS: Final = frozenset({"step", "global_step", "current_step", "iteration", "iter", "global_iter"})
LEAST_EPOCHS: Final = 2
"""Completed epochs between two saves: within one epoch, its number stays."""
LEAST_STEPS: Final = 100
"""Completed steps between two saves: updates may be counted, of several batches each."""


SAME_ARRAYS_STEPS: Final = 10
"""Completed steps between two saves with the same immutable arrays: a step or two may leave its update out."""


@record
class _Seen:
    value: Any
    step: int
    epoch: int


class StaleCounts:
    """Compares the counts in one state from save to save, until each was seen to change."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._arrays = _StaleArrays()
        self._waiting: dict[tuple[str, ...], _Seen | None] = {
            keys: None
            for keys, value in _entries(state)
            if keys[-1] in EPOCHS | STEPS and type(value) in (int, float)
            if len(keys) == 1 or keys[-1] in EPOCHS or value == 0
        }

    def check(self, step: int, epoch: int, sources: Sequence[Any] = ()) -> str | None:
        """Returns a warning about a count that has not changed since an earlier save, though training has, or about
        arrays that nobody has replaced; each once. `step` and `epoch`: how many are completed; `sources`: of the
        state's leaves."""
        if arrays := self._arrays.check(sources, step):
            return arrays
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


class _StaleArrays:
    """Notices that no array of a state of immutable arrays is ever replaced: what a step has made was not assigned."""

    def __init__(self) -> None:
        self._seen: Sequence[weakref.ref[Any]] = ()
        self._step = 0
        self._done = False

    def check(self, sources: Sequence[Any], step: int) -> str | None:
        """Returns a warning, once, if these sources of a save hold the same arrays of one several steps ago."""
        if self._done:
            return None
        held = [source.array for source in sources if getattr(source, "immutable", False)]
        if not held or len(held) != len(self._seen):
            self._note(held, step)
            return None
        same = all(seen() is array for seen, array in zip(self._seen, held, strict=True))
        if not same:
            self._done = True  # they are replaced, by whoever trains
        elif step - self._step >= SAME_ARRAYS_STEPS:
            self._done = True
            return (
                f"the state holds the same arrays as {step - self._step} steps ago: JAX makes new arrays at each step, "
                "and only those are saved that you assign in the mapping that you passed, state['train'] = …"
            )
        return None

    def _note(self, held: Sequence[Any], step: int) -> None:
        self._seen, self._step = [weakref.ref(array) for array in held], step
