"""The entry point of this package: the ranks of a job join one session and agree on one round after another."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Final

from tenuto.errors import TenutoError, UsageError
from tenuto.ranks.background import KIND, Heartbeat
from tenuto.ranks.cleanup import ConvenedSessions, StaleRounds, StaleSession
from tenuto.ranks.contract import Deadline, KVStore, Ranks, Settings
from tenuto.ranks.handshake import CoordinatorHandshake, Hello, MemberHandshake
from tenuto.ranks.kv.watched import WatchedKVStore
from tenuto.ranks.proposals import Proposal, Proposals
from tenuto.ranks.round import Round
from tenuto.ranks.session import Session

_CLOSED: Final = "it has closed"
_SESSIONS: Final = ConvenedSessions()


class Agreement:
    """The ranks of one job in one session. Safe to use from several threads.

    Every wait takes a deadline: seconds from now, or a `Deadline` shared by several waits. A wait ends at most
    `answer_s` after it.
    """

    def __init__(self, session: Session, leftovers: StaleRounds) -> None:
        settings = session.settings
        self.session = session
        self._leftovers = leftovers
        self._proposals = Proposals(session.rank, session.world_size, 3 * settings.beat_s)
        self._heartbeat = Heartbeat(session, self._proposals, self.round, leftovers.live, leftovers.delete)
        self._round_numbers: dict[str, int] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls, ranks: Ranks, facts: Mapping[str, str], deadline: Deadline | float, settings: Settings | None = None
    ) -> Agreement:
        """Joins the session of this job.

        - `ranks`: this process and the key-value store it shares with the others.
        - `facts`: values that must be equal on all ranks, such as run and repository.

        Raises RanksMissing, RanksDisagree, RankFailed and RankStoreLost, all with phase "handshake".
        """
        settings = settings or Settings()
        until = deadline if isinstance(deadline, Deadline) else settings.deadline(deadline)
        kv_store = WatchedKVStore(ranks.kv_store(), settings)
        try:
            return cls._join(ranks, facts, kv_store, settings, until)
        except BaseException:
            kv_store.close()
            raise

    @classmethod
    def _join(
        cls, ranks: Ranks, facts: Mapping[str, str], kv_store: KVStore, settings: Settings, until: Deadline
    ) -> Agreement:
        hello = Hello(ranks.rank, ranks.world_size, facts)
        if ranks.world_size == 1:
            session, stale = Session(hello.nonce, 0, 1, kv_store, settings), []
        elif ranks.is_coordinator:
            stale = _SESSIONS.stale(kv_store)
            convening = CoordinatorHandshake(kv_store, hello, settings)
            session = convening.run(until)
            stale += [StaleSession(id, ranks.world_size) for id in convening.abandoned]
            _SESSIONS.opened(session)
        else:
            session, stale = MemberHandshake(kv_store, hello, settings).run(until), []
        agreement = cls(session, StaleRounds(session, stale))
        agreement._heartbeat.start()
        return agreement

    @property
    def rank(self) -> int:
        return self.session.rank

    @property
    def world_size(self) -> int:
        return self.session.world_size

    @property
    def is_coordinator(self) -> bool:
        return self.session.is_coordinator

    def round(self, kind: str, number: int | None = None) -> Round:
        """Opens a round of its own for one matter.

        - `kind`: one word.
        - `number`: rises with each round of a kind. None takes the next number; then all ranks must open equally many
          rounds of the kind.

        Raises UsageError for a number that does not rise.
        """
        with self._lock:
            last = self._round_numbers.get(kind, -1)
            number = last + 1 if number is None else number
            if number <= last:
                raise UsageError(
                    f"{kind} {number} comes after {kind} {last}", subject=kind, hint="open rounds with rising numbers"
                )
            self._round_numbers[kind] = number
            return self._leftovers.opened(kind, number)

    def report(self, phase: str) -> None:
        """Sets what this rank does now, for the errors of ranks that wait for it. Free: the next heartbeat carries
        it."""
        self.session.phase = phase

    def request_save(self, reason: str) -> None:
        """Requests a save at a step that all ranks can still agree on. Returns at once; see `at`.

        Raises RankStoreLost on a rank that is not the coordinator.
        """
        self._heartbeat.ask(reason)

    def at(self, step: int, deadline: Deadline | float) -> Proposal | None:
        """Notes in the training thread that this rank completed `step`. Returns the proposal that all ranks save for
        here.

        Returns the newest of several agreed proposals, None where there is none. Waits for the answers of the others
        only where this rank agreed to save here, and then raises what `Round.receive` raises.
        """
        settings = self.session.settings
        due = self._proposals.reached(step, settings.clock.now())
        if not due or self.world_size == 1:
            return due[0] if due else None
        until = deadline if isinstance(deadline, Deadline) else settings.deadline(deadline)
        agreed = [self._agreed(proposal, step, until) for proposal in due]
        return next((one for one in reversed(agreed) if one is not None), None)

    def _agreed(self, proposal: Proposal, step: int, deadline: Deadline) -> Proposal | None:
        """Returns the proposal if all ranks agreed to it."""
        round = self._leftovers.of(KIND, proposal.number)
        if round is None:
            return None  # refused, and ended by the coordinator's own heartbeat before this rank reached the step
        try:
            return proposal if round.receive(deadline, f"{round.phase} (save at step {step})") == b"1" else None
        finally:
            round.end()

    @property
    def agreed_save(self) -> Proposal | None:
        """The save this rank agreed to and has not reached yet; the newest if there are several."""
        return self._proposals.armed

    def close(self, reason: str = _CLOSED) -> None:
        """Leaves the session: ranks that wait for this one raise RankFailed with `reason`. Raises nothing."""
        self._heartbeat.stop(reason, failed=reason != _CLOSED)
        _SESSIONS.closed(self.session)
        self.session.kv_store.close()

    def __enter__(self) -> Agreement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(_CLOSED if error is None else _reason(error))


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error.message if isinstance(error, TenutoError) else error}"
