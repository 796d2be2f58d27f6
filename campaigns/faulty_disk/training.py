"""The small training that faults are put into, and what it was told.

It does one thing at a time: restore, claim, saves of every kind, retention, a note, a beat of the lease, close; then
what an operator does: verify, gc, a one-off save, a load. Each part is a phase; each answer is written down.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from campaigns.recorded_jobs import RUN, state_at
from tenuto.api.save_load import load, save
from tenuto.events import AttemptClaimed, Committed, Event, Removed, SaveStarted
from tenuto.maintenance import gc, verify
from tenuto.model.ids import CheckpointId
from tenuto.policy import keep
from tenuto.policy.save import every
from tenuto.repo.repository import Repo
from tenuto.store.contract import Store
from tenuto.testing.layers import Killed
from tenuto.training import exit_status
from tenuto.training.checkpointer import Checkpointer

ELEMENTS: Final = 3000
STEPS: Final = 4
"""How many steps one training makes."""
KEPT: Final = 2
ONCE: Final = "once"
"""The run of the one-off save."""
OWN_CALLS: Final = ("construct", "restore", "claim", "verify", "gc", "one-off save", "load", "list")
"""Phases in which the caller waits for the store's own answer: such a call lasts as long as the store does."""

State = dict[str, Any]


@dataclass
class Observed:
    """What the training was told. `begun`: the states of saves, by id. `raised`: what came out of each phase."""

    on_error: str
    begun: dict[CheckpointId, State] = field(default_factory=dict)
    committed: list[CheckpointId] = field(default_factory=list)
    removed: list[CheckpointId] = field(default_factory=list)
    raised: list[tuple[str, BaseException]] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    claimed: bool = False
    closed: bool = False
    ended: bool = False
    exit_failure: str | None = None
    """Why the process would leave with a status other than 0, when close was over."""
    taken: list[CheckpointId] = field(default_factory=list)
    due: int | None = None
    """The last step that was to be saved."""

    def raised_in(self, *phases: str) -> list[BaseException]:
        return [error for phase, error in self.raised if phase in phases]


@dataclass
class Training:
    """One process. `seed`: its states are drawn from it and from their step; `with_upkeep`: the operator's part too."""

    store: Store
    seed: int
    on_error: str
    with_upkeep: bool = True
    patience_s: float = 20.0
    """What it gives `wait` and `close`."""
    phase: str = "construct"
    phases: int = 0
    """How many have been begun."""
    told: Observed = field(init=False)
    state: State = field(init=False)

    def __post_init__(self) -> None:
        self.told = Observed(self.on_error)
        self.state = state_at(self.seed, 0, 0, elements=ELEMENTS)

    def emit(self, event: Event) -> None:
        """Takes the engine's events."""
        told = self.told
        if isinstance(event, AttemptClaimed):
            told.claimed = True
        elif isinstance(event, SaveStarted):
            told.begun[event.id] = _copy(self.state)
            told.taken.append(event.id)
        elif isinstance(event, Committed):
            told.committed.append(event.id)
        elif isinstance(event, Removed):
            told.removed.append(event.id)

    def run(self) -> Observed:
        """The whole program. Raises nothing that is an Exception."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self._train()
                if self.with_upkeep:
                    self._maintain()
            except _Over:
                pass
            self.told.warned += [str(one.message) for one in caught]
        self.told.ended = True
        return self.told

    def _train(self) -> None:
        told = self.told
        with self._phase("construct", ends=True):
            ckpt = Checkpointer(
                self.store,
                self.state,
                run=RUN,
                save=every(steps=2),
                keep=keep.latest(KEPT),
                on_error=self.on_error,  # type: ignore[arg-type]
                sinks=[self],
            )
        try:
            with self._phase("restore", ends=True):
                ckpt.restore()
            first = ckpt.step
            with self._phase("claim", ends=True):
                ckpt._training.claim(ckpt)  # type: ignore[union-attr]
            for number in range(1, STEPS + 1):
                self._step(ckpt, first + number)
        except _Over:
            ckpt._withdraw()
            with self._phase("close"):
                ckpt.close(self.patience_s)
            raise
        with self._phase("close"):
            ckpt.close(self.patience_s)
        told.closed = True
        told.exit_failure = "; ".join(exit_status._ending.failures.values()) or None

    def _step(self, ckpt: Checkpointer, step: int) -> None:
        """One step: saved beside training by the policy at even steps, at once at the first odd one. Then a note of a
        metric that comes late, and a beat of the lease."""
        self.state.update(state_at(self.seed, 0, step, elements=ELEMENTS))
        self.told.due = step if step % 2 == 0 or step % 4 == 3 else self.told.due
        with self._phase("save"):
            ckpt.step_done(step, loss=float(step))
        if step % 4 == 3:
            with self._phase("save and wait"):
                ckpt.save(wait=True)
        with self._phase("drain"):
            ckpt.wait(self.patience_s)
        if step % 4 == 0:
            with self._phase("note"):
                ckpt.log(accuracy=1.0 / step)
            with self._phase("beat"):
                attempt = ckpt._training.saving.attempt  # type: ignore[union-attr]
                assert attempt is not None and attempt._lease is not None
                beat = threading.Thread(target=attempt._lease._try_beat, daemon=True)  # as the lease does it
                beat.start()
                beat.join(self.patience_s)

    def _maintain(self) -> None:
        with self._phase("list", ends=True):
            repo = Repo.open(self.store)
        with self._phase("verify"):
            verify.execute(repo, verify.plan_verify(repo), threads=1, note=True)
        for _ in range(2):
            with self._phase("gc"):
                gc.execute(repo, gc.plan_gc(repo, grace_s=0.0))
        with self._phase("one-off save"):
            state = state_at(self.seed, 1, 0, elements=ELEMENTS)
            self.told.begun[CheckpointId(ONCE, 1, 0)] = state
            self.told.committed.append(save(state, self.store, step=0, run=ONCE).id)
        with self._phase("load"):
            load(self.store, run=RUN)

    @contextmanager
    def _phase(self, name: str, *, ends: bool = False) -> Iterator[None]:
        """What comes out of the block is written down. `ends`: after it there is nothing to go on with."""
        self.phase = name
        self.phases += 1
        try:
            yield
        except (_Over, Killed):
            raise
        except Exception as error:
            self.told.raised.append((name, error))
            if ends:
                raise _Over from error


class _Over(BaseException):
    """Nothing is left to be done in this process."""


def _copy(state: State) -> State:
    return {
        key: _copy(value) if isinstance(value, dict) else (value.copy() if isinstance(value, np.ndarray) else value)
        for key, value in state.items()
    }


def equal(left: Any, right: Any) -> bool:
    """Bit for bit, types and dtypes included."""
    if isinstance(left, dict):
        same = isinstance(right, dict) and left.keys() == right.keys()
        return same and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and left.tobytes() == right.tobytes()
    return type(left) is type(right) and bool(left == right)
