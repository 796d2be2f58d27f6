"""One agreement of the ranks: each may send to it, the coordinator gathers and broadcasts.

The outcome of a round is one key that is written only once, by the first writer: the coordinator's broadcast, the
failure of a rank, or the failure of a rank that gave up waiting. So all ranks learn the same outcome, even one that was
stopped and resumes later.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Final, TypeVar

from tenuto.errors import RankFailed, RanksError, RanksMissing, RankStoreLost, UsageError
from tenuto.ranks.contract import Deadline, VoteResult
from tenuto.ranks.session import Message, Session, decode, failure

Found = TypeVar("Found")

REASON: Final = 2000
"""The characters of a reason that are sent to the others."""


class Round:
    """One round. As a context manager: an exception that leaves the block fails the round on all ranks, and its end
    ends it here.

    `phase` names the round in errors and reports; the methods take a narrower one.
    """

    def __init__(
        self, session: Session, kind: str, number: int, low: Callable[[], int], ended: Callable[[Round, int], None]
    ) -> None:
        self.kind = kind
        self.number = number
        self.name = f"{kind}/{number}"
        self.phase = f"{kind} {number}"
        self.posted = False
        self.over = False
        self._session = session
        self._low = low
        self._ended = ended
        self._lowest = 0
        self._messages: dict[int, Message] = {}
        self._unconfirmed: list[int] = []
        self._each = False

    @property
    def register(self) -> str:
        """The key of the outcome."""
        return self._session.key("topics", self.kind, self.number, "outcome")

    @property
    def coordinates(self) -> bool:
        """Whether this rank gathers and broadcasts."""
        return self._session.is_coordinator

    def message_key(self, rank: int) -> str:
        return self._session.key("topics", self.kind, self.number, "posts", rank)

    def reply_key(self, rank: int) -> str:
        return self._session.key("topics", self.kind, self.number, "answers", rank)

    def send(self, data: bytes, *, again: bool = False) -> None:
        """Sends `data` to the coordinator in one round trip, without waiting.

        Raises RankStoreLost; then the coordinator no longer counts on this rank, unless it will send `again`.
        """
        message = Message(self._session.id, self.name, self._session.rank, facts={"low": self._low()}, data=data)
        try:
            self._put(self.message_key(self._session.rank), message)
        except RankStoreLost:
            if not again:
                self._session.stall_guard.give_up(self.name)
            raise
        self.posted = True

    def _put(self, key: str, message: Message) -> None:
        session, raw = self._session, message.encode()
        session.ask(lambda timeout: session.kv_store.put(key, raw, timeout=timeout), self.phase)

    def gather(self, deadline: Deadline | float, phase: str = "") -> list[bytes]:
        """Returns, on the coordinator, what each rank sent, by rank.

        Raises RanksMissing, RankFailed, RanksDisagree and RankStoreLost; the first three on all ranks alike.
        """
        self._only_coordinator("gather")
        result = self._wait(self._read_messages, self._missing, deadline, phase)
        if isinstance(result, Message):
            raise self._already_broadcast()
        return result

    def gathered(self) -> list[bytes] | None:
        """Polls `gather` once without waiting: None while messages are missing."""
        self._only_coordinator("gather")
        return self._session.ask(self._read_messages, self.phase)

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._session.world_size) if rank not in self._messages] or self._unconfirmed

    def _read_messages(self, timeout: float) -> list[bytes] | None:
        session = self._session
        missing = [rank for rank in range(session.world_size) if rank not in self._messages]
        keys = [self.register, *map(self.message_key, missing)]
        outcome, *raws = session.kv_store.get_many(keys, timeout=timeout)
        if outcome is not None:
            self._checked(decode(outcome, session.id, self.name))
        for rank, raw in zip(missing, raws, strict=True):
            if raw is not None:
                self._messages[rank] = decode(raw, session.id, self.name, rank)
        if len(self._messages) < session.world_size:
            return None
        self._unconfirmed = session.stall_guard.unconfirmed(list(range(1, session.world_size)), timeout)
        if self._unconfirmed:
            return None
        self._refuse_if_given_up()
        self._lowest = min(int(message.facts["low"]) for message in self._messages.values())
        return [self._messages[rank].data for rank in range(session.world_size)]

    def _refuse_if_given_up(self) -> None:
        session, ranks = self._session, self._session.watch.given_up(self.name)
        if ranks:
            error = RanksMissing(
                f"{self.phase}: while rank {session.rank} was stopped, or {session.kv_store.name} did not answer, "
                f"{session.watch.describe(ranks)} gave up",
                subject=self.phase,
                hint=f"find out what stopped rank {session.rank} or the place where the ranks meet",
                ranks=tuple(ranks),
                phase=self.phase,
            )
            self._checked(self._settle(failure(session.id, self.name, session.rank, error)))

    def broadcast(self, data: bytes, each: Sequence[bytes] = ()) -> None:
        """Publishes the outcome, on the coordinator.

        - `data`: for all ranks.
        - `each`: by rank, for that rank alone (`own_reply`): each of thousands of ranks reads only its own part.

        Raises the failure of the round if it has failed (RankFailed, RanksMissing), and RankStoreLost.
        """
        self._only_coordinator("broadcast")
        for rank, one in enumerate(each):
            self._each = True
            self._put(self.reply_key(rank), Message(self._session.id, self.name, self._session.rank, data=one))
        token = {"token": secrets.token_hex(8)}
        message = Message(self._session.id, self.name, self._session.rank, facts=token, data=data)
        settled = self._settle(message)
        self._checked(settled)
        if settled.facts != message.facts:
            raise self._already_broadcast()

    def receive(self, deadline: Deadline | float, phase: str = "") -> bytes:
        """Returns what the coordinator broadcast. Raises RanksMissing, RankFailed, RanksDisagree, RankStoreLost."""
        session, silent = self._session, [0]

        def poll(timeout: float) -> Message | None:
            raw = session.kv_store.get(self.register, timeout=timeout)
            if raw is None and self.posted and (session.is_coordinator or until.passed):
                self._check_silent_ranks(silent, timeout)
            return None if raw is None else decode(raw, session.id, self.name)

        until = deadline if isinstance(deadline, Deadline) else session.settings.deadline(deadline)
        received: Message = self._wait(poll, lambda: silent, until, phase)
        return self._checked(received).data

    def own_reply(self) -> bytes:
        """Returns what was broadcast to this rank alone, after `receive`. Raises RanksDisagree if nothing was,
        RankStoreLost."""
        session, key = self._session, self.reply_key(self._session.rank)
        raw = session.ask(lambda timeout: session.kv_store.get(key, timeout=timeout), self.phase)
        return decode(raw or b"", self._session.id, self.name, 0).data

    def all_gather(self, data: bytes, deadline: Deadline | float, phase: str = "") -> list[bytes]:
        """Returns, on every rank, what each rank gave, by rank. Raises what `gather` raises."""
        self.send(data)
        if self._session.is_coordinator:
            all_data = self.gather(deadline, phase)
            lengths = json.dumps([len(each) for each in all_data]).encode()
            self.broadcast(b"\n".join([lengths, b"".join(all_data)]))
            return all_data
        lengths, _, rest = self.receive(deadline, phase).partition(b"\n")
        parts, begin = [], 0
        for length in json.loads(lengths):
            parts.append(rest[begin : begin + length])
            begin += length
        return parts

    def vote(self, ok: bool, reason: str, deadline: Deadline | float, phase: str = "") -> VoteResult:
        """Returns the same result on every rank. `reason` counts where not `ok`.

        Raises RanksMissing, RankFailed, RanksDisagree, RankStoreLost.
        """
        self.send(b"" if ok else b"\n" + reason[:REASON].encode("utf-8", "replace"))
        if self._session.is_coordinator:
            votes = enumerate(self.gather(deadline, phase))
            verdict = VoteResult({rank: vote[1:].decode("utf-8", "replace") for rank, vote in votes if vote})
            self.broadcast(json.dumps(dict(verdict.reasons)).encode())
            return verdict
        reasons: Mapping[str, str] = json.loads(self.receive(deadline, phase))
        return VoteResult({int(rank): text for rank, text in reasons.items()})

    def fail(self, reason: str, phase: str = "") -> bool:
        """Fails the round: every rank that waits for it, now or later, raises RankFailed.

        Returns whether the failure stands; it does not if the coordinator broadcast first or the key-value store is
        lost. Raises nothing, because callers are already handling an exception.
        """
        rank, phase = self._session.rank, phase or self.phase
        error = RankFailed(
            f"{phase}: rank {rank} has failed: {reason[:REASON]}",
            subject=f"rank {rank}",
            hint=f"look at the log of rank {rank}",
            ranks=(rank,),
            phase=phase,
        )
        try:
            return self._settle(failure(self._session.id, self.name, rank, error)).kind != "data"
        except RanksError:
            return False

    def check(self) -> None:
        """Raises the failure of the round, if it has failed, and RankStoreLost. Does not wait."""
        self.outcome()

    def outcome(self) -> bytes | None:
        """Returns what was broadcast, None if nothing was. Otherwise as `check`."""
        raw = self._session.ask(lambda timeout: self._session.kv_store.get(self.register, timeout=timeout), self.phase)
        return None if raw is None else self._checked(decode(raw, self._session.id, self.name)).data

    def end(self) -> None:
        """Ends the round on this rank. Once every rank has ended it, its keys are deleted."""
        if not self.over:
            self.over = True
            self._ended(self, self._lowest)

    def keys(self, *, every: bool = False) -> list[str]:
        """Returns the keys it may have in the key-value store. `every`: also those that only another process can know
        of."""
        ranks = range(self._session.world_size)
        answers = map(self.reply_key, ranks) if every or self._each else ()
        return [self.register, *map(self.message_key, ranks), *answers]

    def __enter__(self) -> Round:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not (isinstance(error, RanksError) and error.phase):
            self.fail(f"{type(error).__name__}: {error}")
        self.end()

    def _wait(
        self,
        poll: Callable[[float], Found | Message | None],
        missing: Callable[[], list[int]],
        deadline: Deadline | float,
        phase: str,
    ) -> Found | Message:
        session, phase = self._session, phase or self.phase
        until = deadline if isinstance(deadline, Deadline) else session.settings.deadline(deadline)

        def give_up(error: RanksError) -> Found | Message:
            """Settles the failure for all ranks; an outcome settled earlier stands."""
            return self._checked(self._settle(failure(session.id, self.name, session.rank, error)))

        def over() -> RanksError | None:
            return session.over(missing(), until, phase)

        try:
            return session.wait(poll, over, give_up, missing=missing, deadline=until, phase=phase)
        except RankStoreLost:
            session.stall_guard.give_up(self.name)
            raise

    def _settle(self, message: Message) -> Message:
        settle = self._session.settle
        return self._session.ask(lambda timeout: settle(self.register, message, timeout), self.phase)

    def _check_silent_ranks(self, silent: list[int], timeout: float) -> None:
        """Finds the ranks that have not sent: once this rank has, all must."""
        ranks = range(self._session.world_size)
        raws = self._session.kv_store.get_many([self.message_key(rank) for rank in ranks], timeout=timeout)
        silent[:] = [rank for rank, raw in zip(ranks, raws, strict=True) if raw is None] or [0]

    def _checked(self, outcome: Message) -> Message:
        error = outcome.error(self._session.rank)
        if error is not None:
            raise error
        return outcome

    def _only_coordinator(self, what: str) -> None:
        if not self._session.is_coordinator:
            raise UsageError(
                f"only the coordinator can {what}, and this is rank {self._session.rank}",
                subject=self.name,
                hint="send to the round, and receive what comes of it",
            )

    def _already_broadcast(self) -> UsageError:
        return UsageError(
            f"{self.name} has been broadcast already", subject=self.name, hint="open a round of its own for each matter"
        )
