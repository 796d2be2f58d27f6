"""Saving at a step that one rank wishes for, where the wish is not the same function of the step on all ranks.

The coordinator proposes a step that no rank should have reached. Each rank answers in the background: yes while it has
not reached the step, no afterwards. Who has said yes waits at that step until it is known whether all have; who has not
goes on. If one said no, a later step is proposed. Between proposals the training thread only compares two numbers.

All know of a step that they have agreed to well before they reach it. Others may be proposed until then, and each
stands by itself: who has said yes keeps its word.

This file decides and does no I/O; `pulse` moves what is decided.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Final

_FURTHEST: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Proposal:
    """Every rank saves at the first step that is `step` or later. `by` is the rank that wished for it."""

    number: int
    step: int
    reason: str
    by: int


class Proposals:
    """What one rank knows of proposals, and of its own step. `latency_s`: how long an answer takes, about."""

    def __init__(self, rank: int, world_size: int, latency_s: float) -> None:
        self._rank = rank
        self._alone = world_size == 1
        self._latency_s = latency_s
        self._lock = threading.Lock()
        self._step = -1
        self._reached_at: float | None = None
        self._step_s = 0.0
        self._armed: list[Proposal] = []
        """By number. Several, where one is agreed to and its step is still to come when the next is proposed."""
        self._seen = 0
        self._wishes: list[tuple[int, str, int]] = []
        """Rank, reason, and the step that this rank had completed."""
        self._open: Proposal | None = None
        self._lead = 1

    # -- the training thread

    def reached(self, step: int, now: float) -> list[Proposal]:
        """This rank has completed `step`. The proposals whose outcome it has to wait for here, by number."""
        with self._lock:
            if self._reached_at is not None and step > self._step:
                spent = (now - self._reached_at) / (step - self._step)
                self._step_s = spent if self._step_s == 0 else 0.5 * (self._step_s + spent)
            self._step, self._reached_at = step, now
            if self._alone and self._wishes:
                by, reason, _ = self._wishes[0]
                self._wishes.clear()
                self._seen += 1
                return [Proposal(self._seen, step, reason, by)]
            if not self._armed:
                return []
            due = [one for one in self._armed if one.step <= step]
            self._armed = [one for one in self._armed if one.step > step]
            return due

    @property
    def armed(self) -> Proposal | None:
        """Where this rank will wait: for the newest, where there are several."""
        with self._lock:
            return self._armed[-1] if self._armed else None

    # -- every rank, in the background

    def new(self, proposal: Proposal) -> bool:
        """Whether this rank has not answered it yet."""
        with self._lock:
            return proposal.number > self._seen

    def answer(self, proposal: Proposal) -> bool:
        """Whether this rank can save there; from now on it will wait there. Once, of one that is `new`."""
        with self._lock:
            self._seen = proposal.number
            if self._step >= proposal.step:
                return False
            self._armed.append(proposal)
            return True

    def withdrawn(self, number: int) -> None:
        """It has come to nothing: nobody has to wait there any more."""
        with self._lock:
            self._armed = [one for one in self._armed if one.number != number]

    # -- the coordinator, in the background

    def wish(self, by: int, reason: str) -> None:
        with self._lock:
            self._wishes.append((by, reason, self._step))

    def next(self) -> Proposal | None:
        """What is to be proposed now: one at a time, for all wishes since the one before."""
        with self._lock:
            if self._alone or self._open is not None or not self._wishes:
                return None
            by, reason, _ = self._wishes[0]
            ahead = math.ceil(self._latency_s / self._step_s) if self._step_s > 0 else 1
            lead = min(_FURTHEST, max(self._lead, ahead))
            self._open = Proposal(self._seen + 1, max(self._step, 0) + lead, reason, by)
            return self._open

    def open(self) -> Proposal | None:
        with self._lock:
            return self._open

    def decided(self, agreed: bool) -> None:
        """The one that is open has been announced. Where it was refused, the wish stands, for further ahead; and so
        does what was wished for behind the step that is saved."""
        with self._lock:
            saved, self._open = self._open, None
            if agreed and saved is not None:
                self._wishes = [wish for wish in self._wishes if wish[2] >= saved.step]
                self._lead = 1
            else:
                self._lead = min(_FURTHEST, self._lead * 2)
