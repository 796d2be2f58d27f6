"""The handshake in which the ranks find each other: a session that only live processes can join.

The key-value store may hold what earlier incarnations wrote, and late processes may still use it. So each rank puts a
hello with a fresh nonce. The coordinator answers with an offer of the nonces it read and a fresh session id. A rank
that finds its own nonce in an offer acknowledges under that id, which nobody can have known before. The session opens
once all ranks of one offer have acknowledged it with facts equal to the coordinator's. Nobody acknowledges an offer
with stale hellos; another follows.

Facts are compared only with processes that acknowledge, or complain about, a fresh number: leftovers of a dead process
can delay a handshake but never fail it. A process of this host that has acknowledged and then ended fails it at once.

Each hello says which process it is of. When the session opens, each rank learns those of its own host.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Final

from tenuto.concurrency.process import this_process
from tenuto.errors import RanksDisagree, RanksError, RanksMissing, RankStoreLost
from tenuto.model.records import Owner
from tenuto.ranks.contract import Deadline, KVStore, Settings
from tenuto.ranks.heartbeats import NAMED
from tenuto.ranks.host_processes import (
    HostProcesses,
    by_host,
    decode_host,
    decode_owner,
    encode_owner,
    host_of,
)
from tenuto.ranks.session import OFFER, ROOT, Message, Session, decode, failure
from tenuto.record import record

# Hello and offer, the messages before there is a session. What cannot be decoded is ignored: it may be a leftover.


@record
class Hello:
    """The identity of a rank. `nonce` is fresh for each handshake of a process; `facts` must be equal on all ranks."""

    rank: int
    world_size: int
    facts: Mapping[str, str]
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    process: Owner = field(default_factory=lambda: this_process())  # noqa: PLW0108 - looked up by name: simulations replace it

    @property
    def who(self) -> str:
        return f"{self.process.host} pid {self.process.pid}"

    def encode(self) -> bytes:
        values = {name: getattr(self, name) for name in ("rank", "world_size", "nonce")}
        return json.dumps({**values, "process": encode_owner(self.process), "facts": dict(self.facts)}).encode()

    @classmethod
    def decode(cls, raw: bytes | None) -> Hello | None:
        """Decodes a hello. Returns None for anything else."""
        try:
            values = json.loads(raw or b"null")
            return cls(
                int(values["rank"]),
                int(values["world_size"]),
                {str(name): str(value) for name, value in values["facts"].items()},
                str(values["nonce"]),
                decode_owner(values["process"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


@record
class Offer:
    """A session offered to all ranks.

    - `nonces`: of the hellos it answers, by rank.
    - `by`: the nonce of the coordinator.
    """

    session: str
    world_size: int
    by: str
    nonces: Mapping[int, str]

    def encode(self) -> bytes:
        return json.dumps(
            {"session": self.session, "world_size": self.world_size, "by": self.by, "nonces": dict(self.nonces)}
        ).encode()

    @classmethod
    def decode(cls, raw: bytes | None) -> Offer | None:
        try:
            values: dict[str, Any] = json.loads(raw or b"null")
            nonces = {int(rank): str(nonce) for rank, nonce in values["nonces"].items()}
            return cls(str(values["session"]), int(values["world_size"]), str(values["by"]), nonces)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


PHASE: Final = "handshake"
_BEYOND: Final = 1024
"""The ranks of a larger job that are refused at once; the others fail at their deadline."""


class Handshake:
    """The part of one rank in the handshake."""

    def __init__(self, kv_store: KVStore, hello: Hello, settings: Settings) -> None:
        self.kv_store = kv_store
        self.hello = hello
        self.settings = settings
        self.session = self._session_of("none")
        self.acknowledged = False
        self.processes = HostProcesses(settings)
        """The processes that have acknowledged this rank, or offered it the session, as far as this host can tell."""
        self._complained: set[str] = set()

    def run(self, deadline: Deadline) -> Session:
        """Runs the handshake. Raises RanksMissing, RanksDisagree, RankFailed, RankStoreLost."""
        self._put(self._handshake_key("hello", self.hello.rank), self.hello.encode())
        try:
            self.session.wait(
                self._poll,
                lambda: self._timeout_error(deadline),
                _raised,
                missing=self.missing,
                deadline=deadline,
                phase=PHASE,
            )
        except RanksError as error:
            if not self._declined(error):
                raise
        session = self._session_of(self.session.id)
        session.watch.processes = self.processes
        return session

    def _timeout_error(self, deadline: Deadline) -> RanksError | None:
        self.processes.refresh()
        lost = self.processes.lost(range(self.hello.world_size))
        if lost:
            descriptions = [f"rank {rank} ({self.processes.describe(rank)})" for rank in lost[:NAMED]]
            return RanksMissing(
                f"{PHASE}: rank {self.hello.rank} has lost {', '.join(descriptions)}",
                subject=PHASE,
                hint="look at these ranks' logs, then restart the job",
                ranks=tuple(lost),
                phase=PHASE,
            )
        if not deadline.passed:
            return None
        missing = self.missing()
        descriptions = [self.describe_missing(rank) for rank in missing[:NAMED]]
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        return RanksMissing(
            f"{PHASE}: rank {self.hello.rank} waited {deadline.seconds:g} s for {', '.join(descriptions)}{more}",
            subject=PHASE,
            hint="were all processes of the job started, with the same world size, and do they come to the same call?",
            ranks=tuple(missing),
            phase=PHASE,
        )

    def _declined(self, error: RanksError) -> bool:
        """Declines the session because this rank raises `error`. Returns whether the session is open already.

        Raises the error of a rank that declined first.
        """
        if not self.acknowledged:
            return False
        message = failure(self.session.id, PHASE, self.hello.rank, error)
        try:
            settled = self.session.settle(self.session.key("open"), message, self.settings.answer_s)
        except RankStoreLost:
            return False  # the others time out by themselves
        earlier = settled.error(self.hello.rank)
        if earlier is not None and earlier.message != error.message:
            raise earlier from error
        return earlier is None

    def describe_missing(self, rank: int) -> str:
        """Describes a missing rank."""
        return f"rank {rank}, which has offered no session to this process"

    def missing(self) -> list[int]:
        return [0]

    def _poll(self, timeout: float) -> bool | None:
        raise NotImplementedError

    def _session_of(self, id: str) -> Session:
        """Returns this rank's view of the session `id`."""
        return Session(id, self.hello.rank, self.hello.world_size, self.kv_store, self.settings)

    def _handshake_key(self, *parts: str | int) -> str:
        return "/".join([ROOT, "door", *map(str, parts)])

    def _put(self, key: str, value: bytes) -> None:
        self.session.ask(lambda timeout: self.kv_store.put(key, value, timeout=timeout), PHASE)

    def _refuse(self, error: RanksDisagree, nonces: list[str]) -> None:
        keys = [self._handshake_key("refused", nonce) for nonce in nonces]
        for key, nonce in zip(keys, nonces, strict=True):
            self._put(key, failure(nonce, PHASE, self.hello.rank, error).encode())
        if self.kv_store.host_rank == self.hello.rank:
            self._await_removal([key for key in keys if not key.endswith(self.hello.nonce)])

    def _await_removal(self, keys: list[str]) -> None:
        """Waits, for two probes at most, until the others have read why they are refused: the key-value store goes with
        this process."""
        deadline = self.settings.deadline(2 * self.settings.probe_s)

        def removed(timeout: float) -> bool | None:
            return True if not any(self.kv_store.get_many(keys, timeout=timeout)) or deadline.passed else None

        try:
            self.session.wait(removed, lambda: None, _raised, missing=list, deadline=deadline, phase=PHASE)
        except RankStoreLost:
            return  # the refusal is what this rank raises

    def _raise_refusal(self, raw: bytes | None) -> None:
        """Raises the error with which another rank refused this process."""
        if raw is not None:
            error = decode(raw, self.hello.nonce, PHASE).error(self.hello.rank)
            if error is not None:
                self.kv_store.delete([self._handshake_key("refused", self.hello.nonce)], timeout=self.settings.answer_s)
                raise error

    def _claimed_twice(self, other: Hello) -> RanksDisagree:
        return RanksDisagree(
            f"{PHASE}: two processes say that they are rank {self.hello.rank}: {self.hello.who} and {other.who}",
            subject=f"rank {self.hello.rank}",
            hint="give each process of a job its own rank, and each job its own directory or store",
            ranks=(self.hello.rank,),
            phase=PHASE,
        )


class MemberHandshake(Handshake):
    """The handshake of a rank that is not the coordinator."""

    def __init__(self, kv_store: KVStore, hello: Hello, settings: Settings) -> None:
        super().__init__(kv_store, hello, settings)
        self._silent = [0]
        self._by = ""
        """The nonce of the coordinator whose offer this rank has acknowledged."""
        self._foreign = ""
        """The nonce of a coordinator that offered a session to a job of another size."""

    def _poll(self, timeout: float) -> bool | None:
        keys = [OFFER, self._handshake_key("hello", self.hello.rank), self._handshake_key("hello", 0)]
        raw_offer, raw_mine, raw_first = self.kv_store.get_many(keys, timeout=timeout)
        self._raise_refusal(self.kv_store.get(self._handshake_key("refused", self.hello.nonce), timeout=timeout))
        # Read after the offer: once the session is open, a later offer belongs to a later handshake.
        if self.acknowledged and self._is_open(timeout):
            return True
        first, mine, offer = Hello.decode(raw_first), Hello.decode(raw_mine), Offer.decode(raw_offer)
        if first is not None and self.acknowledged and first.nonce == self._by:
            self.processes.add(0, first.process)
        if mine is not None and mine.nonce != self.hello.nonce:
            error = self._claimed_twice(mine)
            self._refuse(error, [mine.nonce, *([first.nonce] if first else []), *([offer.by] if offer else [])])
            raise error
        if offer is not None:
            self._answer(offer)
        return None

    def _timeout_error(self, deadline: Deadline) -> RanksError | None:
        if deadline.passed and self.acknowledged:
            ranks = range(1, self.hello.world_size)
            keys = [self.session.key("ack", rank) for rank in ranks]
            acks = self.kv_store.get_many(keys, timeout=self.session.patience_s(deadline))
            self._silent = [rank for rank, ack in zip(ranks, acks, strict=True) if ack is None] or [0]
        elif deadline.passed and self._foreign:
            # Only now: the refusal of a dead process says nothing about this job while another may still come.
            raw = self.kv_store.get(
                self._handshake_key("refused", self._foreign), timeout=self.session.patience_s(deadline)
            )
            error = decode(raw, self._foreign, PHASE).error(self.hello.rank) if raw is not None else None
            if isinstance(error, RanksError):
                return error
        return super()._timeout_error(deadline)

    def missing(self) -> list[int]:
        return self._silent

    def describe_missing(self, rank: int) -> str:
        """Describes the missing rank: all ranks must acknowledge an offer, then the coordinator opens it."""
        if not self.acknowledged:
            return super().describe_missing(rank)
        return f"rank {rank}, which has not {'answered' if rank else 'opened'} the session that was offered"

    def _answer(self, offer: Offer) -> None:
        if offer.nonces.get(self.hello.rank) == self.hello.nonce:
            if offer.session != self.session.id:
                session = self._session_of(offer.session)
                self._put(session.key("ack", self.hello.rank), self.hello.encode())
                self.session.id, self.acknowledged, self._by = session.id, True, offer.by
        elif offer.world_size != self.hello.world_size and offer.by not in self._complained:
            self._complained.add(offer.by)
            self._foreign = offer.by
            self._put(self._handshake_key("stray", offer.by), self.hello.encode())

    def _is_open(self, timeout: float) -> bool:
        # The processes of this host are put before the session opens, so they are read after it.
        keys = [self.session.key("open"), self.session.key("host", host_of(self.hello.process) or "none")]
        raw, processes = self.kv_store.get_many(keys, timeout=timeout)
        if raw is None:
            return False
        error = decode(raw, self.session.id, PHASE).error(self.hello.rank)
        if error is not None:
            raise error
        for rank, process in decode_host(processes, self.hello.rank).items():
            self.processes.add(rank, process)
        return True


class CoordinatorHandshake(Handshake):
    """The handshake of the coordinator."""

    def __init__(self, kv_store: KVStore, hello: Hello, settings: Settings) -> None:
        super().__init__(kv_store, hello, settings)
        self._hellos: dict[int, Hello] = {0: hello}
        self._offered: dict[int, str] = {}
        self._offered_at = settings.clock.now()
        self._acked: set[int] = {0}
        self._acknowledged_by = {0: hello.process}
        self.abandoned: list[str] = []
        """Sessions that were offered and then replaced by others."""

    def missing(self) -> list[int]:
        """Returns the ranks that have not acknowledged to this process."""
        return [rank for rank in range(self.hello.world_size) if rank not in self._acked] or [0]

    def _poll(self, timeout: float) -> bool | None:
        self._read_hellos(timeout)
        self._read_refusals(timeout)
        nonces = {rank: hello.nonce for rank, hello in self._hellos.items()}
        complete = len(nonces) == self.hello.world_size
        if nonces != self._offered and self._due(complete):
            self._offer(nonces)
        if self._offered:
            self._read_acks(timeout)
            if complete and len(self._acked) == self.hello.world_size:
                self._put_processes()
                message = Message(self.session.id, PHASE, 0)
                error = self.session.settle(self.session.key("open"), message, timeout).error(0)
                if error is not None:
                    raise error
                return True
        return None

    def _put_processes(self) -> None:
        hosts = by_host(self._acknowledged_by)
        for host, processes in hosts.items():
            self._put(self.session.key("host", host), processes)
        self._put(self.session.key("hosts"), json.dumps(list(hosts)).encode())

    def _due(self, complete: bool) -> bool:
        """Returns whether to offer now: ranks that come one by one, or replace stale hellos, share an offer."""
        if complete and not self._offered:
            return True
        pause_s = self.settings.probe_s / 10 if complete else self.settings.probe_s
        return self.settings.clock.now() - self._offered_at >= pause_s

    def describe_missing(self, rank: int) -> str:
        hello = self._hellos.get(rank)
        if hello is None:
            return f"rank {rank}, which has not come"
        return f"rank {rank} ({hello.who}), which connected and then sent nothing"

    def _read_hellos(self, timeout: float) -> None:
        ranks = range(self.hello.world_size)
        for rank, raw in zip(
            ranks,
            self.kv_store.get_many([self._handshake_key("hello", rank) for rank in ranks], timeout=timeout),
            strict=True,
        ):
            hello = Hello.decode(raw)
            if hello is not None and hello.rank == rank:
                self._hellos[rank] = hello
        if self._hellos[0].nonce != self.hello.nonce:
            error = self._claimed_twice(self._hellos[0])
            self._refuse_all(error)
            raise error

    def _read_refusals(self, timeout: float) -> None:
        try:
            self._raise_refusal(self.kv_store.get(self._handshake_key("refused", self.hello.nonce), timeout=timeout))
        except RanksDisagree as error:
            self._refuse_all(error)
            raise
        stray = Hello.decode(self.kv_store.get(self._handshake_key("stray", self.hello.nonce), timeout=timeout))
        if stray is not None:
            self._compare(stray)

    def _offer(self, nonces: dict[int, str]) -> None:
        if self._offered:
            self.abandoned.append(self.session.id)
        self._offered, self._offered_at = nonces, self.settings.clock.now()
        self._acked = {0}
        self.acknowledged = True
        self.session.id = secrets.token_hex(16)
        offer = Offer(self.session.id, self.hello.world_size, self.hello.nonce, nonces)
        self._put(OFFER, offer.encode())

    def _read_acks(self, timeout: float) -> None:
        ranks = [rank for rank in self._offered if rank not in self._acked]
        raws = self.kv_store.get_many([self.session.key("ack", rank) for rank in ranks], timeout=timeout)
        for rank, raw in zip(ranks, raws, strict=True):
            answer = Hello.decode(raw)
            if answer is not None and answer.nonce == self._offered[rank]:
                self._compare(answer)
                self._acked.add(rank)
                self._acknowledged_by[rank] = answer.process
                self.processes.add(rank, answer.process)

    def _compare(self, other: Hello) -> None:
        mine = {"world size": str(self.hello.world_size), **self.hello.facts}
        theirs = {"world size": str(other.world_size), **other.facts}
        names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
        if not names:
            return
        differences = "; ".join(
            f"{name} is {mine.get(name)!r} on rank 0 ({self.hello.who}) and {theirs.get(name)!r} on rank {other.rank} "
            f"({other.who})"
            for name in names
        )
        error = RanksDisagree(
            f"{PHASE}: the ranks disagree: {differences}",
            subject=", ".join(names),
            hint="start all processes of a job with the same arguments, and give each job its own directory or store",
            ranks=(0, other.rank),
            phase=PHASE,
        )
        self._refuse_all(error, other.nonce, *self._beyond(other.world_size))
        raise error

    def _beyond(self, world_size: int) -> list[str]:
        """Returns the nonces of ranks that assume a larger job. Later ones find what this rank leaves under its own
        nonce."""
        if world_size <= self.hello.world_size:
            return []
        ranks = range(self.hello.world_size, min(world_size, self.hello.world_size + _BEYOND))
        keys = [self._handshake_key("hello", rank) for rank in ranks]
        raws = self.session.ask(lambda timeout: self.kv_store.get_many(keys, timeout=timeout), PHASE)
        return [self.hello.nonce, *(hello.nonce for hello in map(Hello.decode, raws) if hello is not None)]

    def _refuse_all(self, error: RanksDisagree, *more: str) -> None:
        own = {self.hello.nonce} - set(more)
        nonces = {hello.nonce for hello in self._hellos.values()} | set(more)
        self._refuse(error, sorted(nonces - own))


def _raised(error: RanksError) -> bool:
    raise error
