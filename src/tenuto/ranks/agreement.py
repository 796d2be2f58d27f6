"""What engine and api use: the ranks of a job, met in one session, agreeing on one topic after another."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Final

from tenuto.errors import TenutoError, UsageError
from tenuto.ranks.background import KIND, Heartbeat
from tenuto.ranks.cleanup import ConvenedSessions, StaleRounds, StaleSession
from tenuto.ranks.contract import KVStore, Ranks
from tenuto.ranks.handshake import CoordinatorHandshake, Hello, MemberHandshake
from tenuto.ranks.proposals import Proposal, Proposals
from tenuto.ranks.round import Round
from tenuto.ranks.session import Session
from tenuto.ranks.timeouts import Deadline, Settings

_CLOSED: Final = "it has closed"
_PAST: Final = ConvenedSessions()


class Agreement:
    """The ranks of one job, in one session. May be used by several threads at once.

    Every wait has a deadline: seconds from now, or a `Deadline` that several waits share. A wait ends `answer_s` after
    it at the latest.
    """

    def __init__(self, session: Session, leftovers: StaleRounds) -> None:
        settings = session.settings
        self.session = session
        self._leftovers = leftovers
        self._proposals = Proposals(session.rank, session.world_size, 3 * settings.beat_s)
        self._pulse = Heartbeat(session, self._proposals, self.round, leftovers.live, leftovers.tidy)
        self._round_numbers: dict[str, int] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls, ranks: Ranks, facts: Mapping[str, str], deadline: Deadline | float, settings: Settings | None = None
    ) -> Agreement:
        """Meets the other ranks. `facts`: what has to be equal on all of them, such as run and repository.

        Raises RanksMissing, RanksDisagree, RankFailed and RankStoreLost, all with phase "handshake".
        """
        settings = settings or Settings()
        until = deadline if isinstance(deadline, Deadline) else settings.deadline(deadline)
        kv_store = ranks.kv_store()
        try:
            return cls._met(ranks, facts, kv_store, settings, until)
        except BaseException:
            kv_store.close()
            raise

    @classmethod
    def _met(
        cls, ranks: Ranks, facts: Mapping[str, str], kv_store: KVStore, settings: Settings, until: Deadline
    ) -> Agreement:
        hello = Hello(ranks.rank, ranks.world_size, facts)
        if ranks.world_size == 1:
            session, before = Session(hello.nonce, 0, 1, kv_store, settings), []
        elif ranks.is_coordinator:
            before = _PAST.before(kv_store)
            convening = CoordinatorHandshake(kv_store, hello, settings)
            session = convening.run(until)
            before += [StaleSession(id, ranks.world_size) for id in convening.abandoned]
            _PAST.opened(session)
        else:
            session, before = MemberHandshake(kv_store, hello, settings).run(until), []
        agreement = cls(session, StaleRounds(session, before))
        agreement._pulse.start()
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
        """A topic of its own for one matter: `kind` is a word, `number` rises with each of that kind.

        Without a number it is the next one; then every rank has to open as many of the kind. Raises UsageError for a
        number that does not rise.
        """
        with self._lock:
            last = self._round_numbers.get(kind, -1)
            number = last + 1 if number is None else number
            if number <= last:
                raise UsageError(
                    f"{kind} {number} comes after {kind} {last}", subject=kind, hint="open topics with rising numbers"
                )
            self._round_numbers[kind] = number
            return self._leftovers.opened(kind, number)

    def report(self, phase: str) -> None:
        """What this rank does now, for the errors of those that wait for it. Costs nothing: told with the next beat."""
        self.session.phase = phase

    def want(self, reason: str) -> None:
        """This rank wishes for a save, at a step that all ranks can still agree on. Returns at once; see `at`.

        Raises RankStoreLost, on a rank that is not the coordinator.
        """
        self._pulse.ask(reason)

    def at(self, step: int, deadline: Deadline | float) -> Proposal | None:
        """This rank has completed `step`, in the training thread; what all ranks save for here, if they do: the newest
        of what they have agreed to, where that is more than one.

        Waits only where this rank has agreed to save here, for the others' answers. Raises then what `Topic.hear` does.
        """
        settings = self.session.settings
        due = self._proposals.reached(step, settings.clock.now())
        if not due or self.world_size == 1:
            return due[0] if due else None
        until = deadline if isinstance(deadline, Deadline) else settings.deadline(deadline)
        heard = [self._heard(proposal, step, until) for proposal in due]
        return next((one for one in reversed(heard) if one is not None), None)

    def _heard(self, proposal: Proposal, step: int, deadline: Deadline) -> Proposal | None:
        """The proposal, where all ranks have agreed to it."""
        round = self._leftovers.of(KIND, proposal.number)
        if round is None:
            return None  # refused, and ended by the coordinator's own pulse, since this rank came to the step
        try:
            return proposal if round.receive(deadline, f"{round.phase} (save at step {step})") == b"1" else None
        finally:
            round.end()

    @property
    def promised(self) -> Proposal | None:
        """The save that this rank has agreed to, while it has not reached its step; the newest, where that is more than
        one."""
        return self._proposals.armed

    def close(self, reason: str = _CLOSED) -> None:
        """This rank takes part no longer: whoever waits for it raises RankFailed, with `reason`. Raises nothing."""
        self._pulse.stop(reason)
        _PAST.closed(self.session)
        self.session.kv_store.close()

    def __enter__(self) -> Agreement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(_CLOSED if error is None else _reason(error))


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error.message if isinstance(error, TenutoError) else error}"
