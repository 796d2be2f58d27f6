"""One meeting of the ranks of a job: its keys and messages in the key-value store, and the one loop that waits.

Each message names its session and round. A reader that finds another session or round under a key fails the round, so
no message is mistaken for another, whatever the store does with its keys.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from typing import Any, Final, TypeVar

from tenuto.errors import RankFailed, RanksDisagree, RanksError, RanksMissing, RankStoreLost
from tenuto.ranks.contract import Deadline, KVStore, Settings
from tenuto.ranks.heartbeats import RankWatch, StallGuard
from tenuto.ranks.kv.watched import WatchedKVStore
from tenuto.record import record

_FAILURES: Final[dict[str, type[RanksError]]] = {
    "failed": RankFailed,
    "missing": RanksMissing,
    "disagree": RanksDisagree,
}
_KINDS: Final = {kind: name for name, kind in _FAILURES.items()}
DATA: Final = "data"


@record
class Message:
    """One message. `kind` is "data" or the kind of failure."""

    session: str
    round: str
    rank: int
    kind: str = DATA
    facts: Mapping[str, Any] = field(default_factory=dict)
    data: bytes = b""

    def encode(self) -> bytes:
        head = {"session": self.session, "topic": self.round, "rank": self.rank, "kind": self.kind, "facts": self.facts}
        return json.dumps(head, separators=(",", ":")).encode() + b"\n" + self.data

    def error(self, reader: int) -> RanksError | None:
        """Returns the error of a failure message, as rank `reader` raises it; None for data."""
        kind = _FAILURES.get(self.kind)
        if kind is None:
            return None
        origin = "" if reader == self.rank else f" (told by rank {self.rank})"
        return kind(
            f"{self.facts['message']}{origin}",
            subject=self.facts["phase"],
            hint=self.facts["hint"],
            ranks=tuple(self.facts["ranks"]),
            phase=self.facts["phase"],
        )


def failure(session: str, round: str, rank: int, error: RanksError) -> Message:
    """Encodes `error` as a message that every rank raises."""
    facts = {"message": error.message, "phase": error.phase, "hint": error.hint, "ranks": list(error.ranks)}
    kind = next((name for kind, name in _KINDS.items() if isinstance(error, kind)), "failed")
    return Message(session, round, rank, kind, facts)


def decode(raw: bytes, session: str, round: str, rank: int | None = None) -> Message:
    """Decodes a message. Raises RanksDisagree if it belongs to another session, round or rank."""
    head, _, data = raw.partition(b"\n")
    try:
        values = json.loads(head)
        message = Message(
            values["session"], values["topic"], int(values["rank"]), values["kind"], dict(values["facts"]), data
        )
    except (ValueError, KeyError, TypeError) as error:
        raise _foreign(round, f"no message of Tenuto ({error})") from error
    if (message.session, message.round) != (session, round) or rank not in (None, message.rank):
        raise _foreign(round, f"a message of rank {message.rank} of session {message.session} on {message.round!r}")
    return message


def _foreign(round: str, found: str) -> RanksDisagree:
    return RanksDisagree(
        f"what the ranks' key-value store holds for {round!r} is {found}",
        subject=round,
        hint="does another job use the same directory or store? give each job its own",
        phase=round,
    )


Result = TypeVar("Result")

ROOT: Final = "tenuto"
OFFER: Final = f"{ROOT}/door/offer"
"""The key under which the coordinator offers a session."""
_FIRST_PAUSE_S: Final = 0.001
_PAUSE_SHARE: Final = 0.1
"""A wait takes at most this share longer than it must."""
_EACH_S: Final = 20e-6
"""Seconds of a pause per rank: all ranks together poll at most 50,000 times a second, until pauses are longest."""
_BEHIND_S: Final = 2.0
"""After so long the coordinator reports for whom it waits, and again after twice the time each."""
_SHORTEST_S: Final = 0.05
"""The least timeout of a request to the key-value store, however near the deadline is."""


class Session:
    """The session of one rank.

    `id` is in every key and message and is fresh for each meeting, so nothing of another session can appear here.
    """

    def __init__(self, id: str, rank: int, world_size: int, kv_store: KVStore, settings: Settings) -> None:
        self.id = id
        self.rank = rank
        self.world_size = world_size
        self.kv_store = kv_store if isinstance(kv_store, WatchedKVStore) else WatchedKVStore(kv_store, settings)
        self.settings = settings
        self.watch = RankWatch(self.kv_store, self.beat_key, settings)
        self.stall_guard = StallGuard(self.kv_store, self.key, self.watch, settings)
        self.phase = ""
        """The activity of this rank, as last reported."""
        self.behind: Callable[[str, Sequence[int], float], None] | None = None
        """Called on the coordinator by the thread that waits, with the phase, the ranks it waits for, and the seconds
        so far."""
        self.on_loss: Callable[[RanksError], None] | None = None
        """Called once, by the thread of the heartbeat, with the `loss`."""
        self._waiting: list[tuple[str, Callable[[], Sequence[int]]]] = []
        self._lock = threading.Lock()

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    def key(self, *parts: str | int) -> str:
        return "/".join([ROOT, "sessions", self.id, *map(str, parts)])

    def beat_key(self, rank: int) -> str:
        return self.key("beat", rank)

    @property
    def status(self) -> str:
        """The activity of this rank, and what it waits for."""
        with self._lock:
            waiting = f"waiting for {self._waiting[-1][0]}" if self._waiting else ""
        return ", ".join(part for part in (self.phase, waiting) if part)

    @property
    def waits_for(self) -> str:
        """The round that this rank waits for, and the ranks; empty where it waits for none."""
        with self._lock:
            waiting = self._waiting[-1] if self._waiting else None
        if waiting is None:
            return ""
        others = [rank for rank in waiting[1]() if rank != self.rank]
        return f"{waiting[0]}: {self.watch.describe(others)}" if others else waiting[0]

    @contextmanager
    def _waits_for(self, phase: str, missing: Callable[[], Sequence[int]]) -> Iterator[None]:
        waiting = phase, missing
        with self._lock:
            self._waiting.append(waiting)
        try:
            yield
        finally:
            with self._lock:
                self._waiting.remove(waiting)

    def ask(self, question: Callable[[float], Result], phase: str) -> Result:
        """Returns `question(timeout)`, retried for `answer_s` while the key-value store does not answer."""
        deadline = self.settings.deadline(self.settings.answer_s)
        while True:
            try:
                return question(max(deadline.remaining_s, _SHORTEST_S))
            except RankStoreLost as error:
                if error.lasting or deadline.passed or self.kv_store.lost:
                    raise self.lost(error, phase, []) from error
            self.settings.clock.sleep(min(self.kv_store.longest_pause_s, deadline.remaining_s))

    def settle(self, key: str, message: Message, timeout: float) -> Message:
        """Settles the value of `key` once for all ranks. Returns `message`, or the message settled before it."""
        raw = self.kv_store.put_if_absent(key, message.encode(), timeout=timeout)
        return decode(raw, self.id, message.round)

    def wait(
        self,
        poll: Callable[[float], Result | None],
        over: Callable[[], RanksError | None],
        give_up: Callable[[RanksError], Result],
        *,
        missing: Callable[[], Sequence[int]],
        deadline: Deadline,
        phase: str,
    ) -> Result:
        """Returns the first result of `poll(timeout)` that is not None, or `give_up(reason)` for a reason of `over`.

        `over` must return a reason at the deadline. Raises RankStoreLost where the key-value store is lost, at the
        deadline at the latest.
        """
        clock, longest_s = self.settings.clock, self.kv_store.longest_pause_s
        began, least_s = clock.now(), max(_FIRST_PAUSE_S, self.world_size * _EACH_S)
        report_s = _BEHIND_S
        with self._waits_for(phase, missing):
            while True:
                reason: RanksError | None = None
                try:
                    found = poll(self.patience_s(deadline))
                    if found is not None:
                        return found
                    reason = over()
                    if reason is not None:  # what was sent before its sender left, or died, counts
                        found = poll(self.patience_s(deadline))
                        if found is not None:
                            return found
                except RankStoreLost as error:
                    if error.lasting or deadline.passed or self.kv_store.lost:
                        raise self.lost(error, phase, missing()) from error
                if reason is not None:
                    return give_up(reason)
                if self.behind is not None and self.is_coordinator and clock.now() - began >= report_s:
                    report_s *= 2
                    self.behind(phase, [rank for rank in missing() if rank != self.rank], clock.now() - began)
                pause = min(max((clock.now() - began) * _PAUSE_SHARE, least_s), longest_s)
                clock.sleep(min(pause, max(deadline.remaining_s, _FIRST_PAUSE_S)))

    def patience_s(self, deadline: Deadline) -> float:
        """Returns how long one request to the key-value store may take. Seconds."""
        return max(_SHORTEST_S, min(self.settings.answer_s, deadline.remaining_s))

    def over(self, missing: Sequence[int], deadline: Deadline, phase: str) -> RanksError | None:
        """Returns why waiting for the `missing` ranks is in vain: one has left or is lost, another rank is dead, or it
        is too late. Else None."""
        others = [rank for rank in missing if rank != self.rank]
        late, watch = deadline.passed, self.watch
        watch.refresh(self.patience_s(deadline))
        if others and (late or watch.due(others)):
            watch.read(others, self.patience_s(deadline))
        left = watch.departed(others)
        if left and not watch.dead():  # else they have left because of that
            return _left(left, phase)
        # Another one's death ends the wait as well, unless what it has sent before is enough.
        lost = watch.lost(others) or watch.dead(for_s=0.0 if left else 2 * self.settings.beat_s)
        if not lost and not late:
            return None
        how = f"within {deadline.seconds:g} s"
        if lost:
            dead = set(lost) & set(watch.dead())
            how = "and will not" + ("" if dead else f": no sign of life for {self.settings.dead_after_s:g} s")
        accused = tuple(lost or missing)
        return RanksMissing(
            f"{phase}: rank {self.rank} waited for {watch.describe(accused)}, which did not come {how}",
            subject=phase,
            hint="look at these ranks' logs and nodes: stopped, killed, or slower than the deadline allows?",
            ranks=accused,
            phase=phase,
        )

    @property
    def loss(self) -> RanksError | None:
        """The loss after which this session can agree on nothing any more: of a rank's process, or of the key-value
        store. None while there is none. A rank that is stopped or silent may come back, and so may a store that does
        not answer."""
        phase, error, dead = self.status or "training", self.kv_store.gone, self.watch.dead()
        if error is None and self.kv_store.host_rank in dead:
            place = self.kv_store.name
            error = RankStoreLost(f"{place}, where the ranks meet, is lost", subject=place, hint="restart the job")
            error.lasting = True
        if error is not None:
            return self.lost(error, phase, [])
        if not dead:
            return None
        return RanksMissing(
            f"{phase}: nothing can be saved any more, because {self.watch.describe(dead)} is dead",
            subject=phase,
            hint="look at the logs and nodes of these ranks, then restart the job: it resumes from the last checkpoint",
            ranks=tuple(dead),
            phase=phase,
        )

    @property
    def decides(self) -> bool:
        """Whether decisions of the coordinator can still arrive at this rank."""
        return not self.kv_store.lost and not (self.watch.dead() or self.watch.lost({0} - {self.rank}))

    def lost(self, error: RankStoreLost, phase: str, missing: Sequence[int]) -> RanksError:
        """Returns `error` with the phase and the ranks concerned, for the waiting caller. Where the rank that served
        the store has left, that is the error."""
        if error.phase:
            return error
        host_rank = self.kv_store.host_rank
        hosts = [rank for rank in [host_rank] if rank is not None and rank != self.rank]
        left = self.watch.departed(hosts)
        if left:
            return _left(left, phase)
        others = [rank for rank in missing if rank != self.rank]
        self.watch.processes.refresh()
        served = "" if host_rank is None else f"; rank {host_rank} serves it"
        state = "".join(f": {words}" for words in map(self.watch.processes.describe, hosts) if words)
        waited = f"; waited for {self.watch.describe(others)}" if others else ""
        described = RankStoreLost(
            f"{phase}: {error.message}{served}{state}{waited}",
            subject=error.subject,
            hint=error.hint,
            ranks=tuple(others) if host_rank is None else (host_rank,),
            phase=phase,
        )
        described.lasting = error.lasting
        return described


def _left(left: dict[int, str], phase: str) -> RankFailed:
    rank, reason = next(iter(left.items()))
    more = f" (as {len(left) - 1} more have)" if len(left) > 1 else ""
    return RankFailed(
        f"{phase}: rank {rank} has left the job{more}: {reason}",
        subject=f"rank {rank}",
        hint=f"look at the log of rank {rank}",
        ranks=tuple(left),
        phase=phase,
    )
