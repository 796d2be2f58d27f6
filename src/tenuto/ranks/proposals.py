"""Saves at a step that one rank requests, where the request is not the same function of the step on all ranks.

The coordinator proposes a step that no rank should have reached. Each rank answers in the background: yes while it has
not reached the step, no afterwards. A rank that answered yes waits at that step for the outcome; the others continue.
After a no, the coordinator proposes a later step. Between proposals the training thread only compares two numbers.

All ranks know an agreed step well before they reach it. Others may be proposed until then, and each stands by itself: a
yes is binding.

This module decides and does no I/O; `background` transports the decisions.
"""

from __future__ import annotations

import math
import threading
from typing import Final

from tenuto.record import record

_FURTHEST: Final = 1_000_000


@record
class Proposal:
    """A save by every rank at its first step >= `step`. `by` is the rank that requested it."""

    number: int
    step: int
    reason: str
    by: int


class Proposals:
    """The proposals and the own step of one rank. `latency_s`: the approximate time of an answer."""

    def __init__(self, rank: int, world_size: int, latency_s: float) -> None:
        self._rank = rank
        self._alone = world_size == 1
        self._latency_s = latency_s
        self._lock = threading.Lock()
        self._step = -1
        self._reached_at: float | None = None
        self._step_s = 0.0
        self._armed: list[Proposal] = []
        """By number. Several, if another is proposed before this rank reaches the step of an agreed one."""
        self._seen = 0
        self._wishes: list[tuple[int, str, int]] = []
        """Rank, reason, and the step this rank had completed."""
        self._open: Proposal | None = None
        self._lead = 1

    # -- the training thread

    def reached(self, step: int, now: float) -> list[Proposal]:
        """Notes that this rank completed `step`. Returns the proposals whose outcome it must await here, by number."""
        with self._lock:
            if self._reached_at is not None and step > self._step:
                took = (now - self._reached_at) / (step - self._step)
                self._step_s = took if self._step_s == 0 else 0.5 * (self._step_s + took)
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
        """The newest proposal for which this rank will wait."""
        with self._lock:
            return self._armed[-1] if self._armed else None

    # -- every rank, in the background

    def new(self, proposal: Proposal) -> bool:
        """Returns whether this rank has not answered the proposal yet."""
        with self._lock:
            return proposal.number > self._seen

    def answer(self, proposal: Proposal) -> bool:
        """Answers a `new` proposal once: True if this rank can save there, and from now on it will wait there."""
        with self._lock:
            self._seen = proposal.number
            if self._step >= proposal.step:
                return False
            self._armed.append(proposal)
            return True

    def withdrawn(self, number: int) -> None:
        """Drops a refused proposal: no rank waits for it."""
        with self._lock:
            self._armed = [one for one in self._armed if one.number != number]

    # -- the coordinator, in the background

    def wish(self, by: int, reason: str) -> None:
        with self._lock:
            self._wishes.append((by, reason, self._step))

    def next(self) -> Proposal | None:
        """Returns the proposal to make now: one at a time, for all requests since the previous one."""
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
        """Closes the announced proposal. A refusal keeps the request, for a step further ahead; requests made after the
        saved step stay as well."""
        with self._lock:
            saved, self._open = self._open, None
            if agreed and saved is not None:
                self._wishes = [wish for wish in self._wishes if wish[2] >= saved.step]
                self._lead = 1
            else:
                self._lead = min(_FURTHEST, self._lead * 2)
