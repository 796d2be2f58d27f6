"""The ranks of a job that train one run together: they meet, find one repository, and agree on saves."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, Literal

import numpy as np

from tenuto.crashpoints import crashpoint
from tenuto.engine.group.group_restore import GroupRestore
from tenuto.engine.group.group_save import GroupCommit
from tenuto.engine.group.rounds import SHARE_ONE_PLACE, becomes_visible, sees_claim
from tenuto.engine.read.choose import Prepare
from tenuto.engine.save.handle import Save
from tenuto.engine.save.rank_group import RESTORE_TIMES, RankGroup, SoloGroup
from tenuto.errors import (
    NotARepository,
    RanksDisagree,
    RanksError,
    RanksMissing,
    RankStoreLost,
    TenutoError,
    UsageError,
    in_words,
)
from tenuto.events import Emitter, RanksBehind, Warned
from tenuto.model.ids import run_key
from tenuto.policy.save import Decision, DividedPolicy, Moment, SaveHistory, SavePolicy
from tenuto.ranks.agreement import Agreement
from tenuto.ranks.contract import SILENCE_S, TIMEOUT_S, Ranks, Settings
from tenuto.ranks.round import Round
from tenuto.repo.format.small_records import encode_attempt
from tenuto.repo.ownership.claim import Attempt, announced
from tenuto.repo.replicated.members import join
from tenuto.repo.replicated.places import places_of
from tenuto.repo.replicated.replicated_store import ReplicatedStore
from tenuto.repo.repository import BeforeCreate, Repo
from tenuto.sharding.holdings import Column, rank_names
from tenuto.sharding.write_plan import Strategy
from tenuto.store.contract import Store, Where
from tenuto.store.registry import open_store
from tenuto.version import __version__

_CAME: Final = " came"
_STOPS: Final = "training stops"
FAREWELL_S: Final = 60.0
"""How long the end of training waits for all ranks at most: the key-value store may go with the first that leaves."""


def session_settings(timeout_s: float, silence_s: float = SILENCE_S) -> Settings:
    """Returns the intervals for ranks that wait `timeout_s` for each other, and `silence_s` for a sign of life: a dead
    one is found well before the timeout."""
    usual = Settings()
    silence_s = min(silence_s, timeout_s / 2)
    return Settings(
        beat_s=min(usual.beat_s, timeout_s / 20, silence_s / 10),
        dead_after_s=silence_s,
        answer_s=min(usual.answer_s, timeout_s / 2),
        probe_s=min(usual.probe_s, timeout_s / 10),
    )


class JobGroup:
    """This process as one of the ranks of a job, in its training thread."""

    writes_all = False
    acts_at_once = False

    def __init__(
        self,
        agreement: Agreement,
        run: str,
        emitter: Emitter,
        timeout_s: float = TIMEOUT_S,
        writers: Strategy = "balanced",
    ) -> None:
        """`writers`: how the ranks divide what they write."""
        self.agreement = agreement
        self.timeout_s = timeout_s
        self.writers: Strategy = writers
        self.spread = False
        """Whether the repository has other places than its home, which not all ranks may find."""
        self._nodes: Column | None = None
        """On the coordinator, the node of each rank, where packs lie on the nodes alone."""
        self.leads = self.coordinates
        """Whether this rank maintains the places that it puts packs into."""
        self._gone = ""
        """The error by which this rank leaves."""
        self._left = False
        self._run = run
        self._emitter = emitter
        self._requested = False
        """Whether a save was requested and has not been taken yet."""
        self._step = -1
        self._wants_to_stop = False
        self._agreed: str | None = None
        """Why all ranks save at this step, where they have agreed to."""

    @classmethod
    def meet(
        cls,
        ranks: Ranks,
        where: Where,
        run: str,
        emitter: Emitter,
        timeout_s: float = TIMEOUT_S,
        *,
        call: str = "Checkpointer",
        find: Callable[[Store], Repo] | None = None,
        facts: Mapping[str, str] | None = None,
        writers: Strategy = "balanced",
        before_create: BeforeCreate | None = None,
        silence_s: float = SILENCE_S,
    ) -> tuple[JobGroup, Repo]:
        """Meets the other ranks, and opens the repository, which has to be the same one for all of them.

        call: the function that all of them called.
        find: opens what is to be read, on the coordinator, which may be another place of the repository; without it a
        repository is made where there is none.
        facts: what else has to be equal on all of them.
        before_create: as for `Repo.create_or_open`, on the coordinator.

        Raises what the store raises; RanksMissing, RanksDisagree, RankFailed and RankStoreLost.
        """
        store = open_store(where)
        places = places_of(store)
        declared = "" if places is None else repr(places.declared)
        alike = {"run": run_key(run), "version": __version__, "writers": writers, "where": declared}
        alike = {"call": f"tenuto.{call}", **alike, **(facts or {})}
        agreement = Agreement.open(ranks, alike, timeout_s, session_settings(timeout_s, silence_s))
        group = cls(agreement, run, emitter, timeout_s, writers)
        agreement.session.behind = group._behind
        crashpoint("ranks met, repository not yet opened")
        try:
            return group, group._open(store, find, before_create)
        except BaseException as error:
            group.leave(error)
            raise

    @property
    def rank(self) -> int:
        return self.agreement.rank

    @property
    def world_size(self) -> int:
        return self.agreement.world_size

    @property
    def coordinates(self) -> bool:
        return self.agreement.is_coordinator

    @property
    def loss(self) -> RanksError | None:
        return self.agreement.session.loss

    def on_loss(self, report: Callable[[RanksError], None]) -> None:
        self.agreement.session.on_loss = report

    def round(self, kind: str) -> Round:
        return self.agreement.round(kind)

    def protocol(self, repo: Repo) -> GroupCommit:
        return GroupCommit(repo, self.agreement, strategy=self.writers, deadline_s=self.timeout_s, nodes=self._nodes)

    def restorer(self, repo: Repo, run: str, prepare: Prepare, emitter: Emitter) -> GroupRestore:
        return GroupRestore(repo, run, prepare, group=self, emitter=emitter)

    def expected_share(self, nbytes: int) -> int | None:
        """Returns an equal share; None where one rank writes all that several hold, so that shares are not equal."""
        return None if self.writers == "one" else nbytes // self.world_size

    def _open(self, where: Store, find: Callable[[Store], Repo] | None, before_create: BeforeCreate | None) -> Repo:
        """Opens the repository, as `find` does on the coordinator; without it, that makes one where there is none. The
        others have to find the same one."""
        phase, wrong = "opening the repository", ""
        with self.agreement.round("place") as round:
            if self.coordinates:
                repo = Repo.create_or_open(where, before_create=before_create) if find is None else find(where)
                self.spread = places_of(repo.store) is not None
                round.broadcast(f"{repo.id} {self.spread} {repo.url if repo.url != where.url else ''}".encode())
            else:
                wanted, spread, elsewhere = round.receive(self.timeout_s, phase).decode().split(" ", 2)
                self.spread = spread == str(True)
                found, wrong = self._find(open_store(elsewhere) if elsewhere else where, wanted)
        self._same_place(where.url, wrong, phase)
        if not self.coordinates:
            assert found is not None, "voted for"
            repo = found
        places = places_of(where)
        if find is None and places is not None:  # alike on all ranks
            self._assign_places(join(repo.store, repo.id), places)
        return repo

    def _assign_places(self, members: Sequence[str], where: ReplicatedStore) -> None:
        """Makes the lowest rank of each node maintain that node's directory. Raises RanksDisagree, on all ranks, where
        the places of a mirror are not the same for all."""
        phase, per_node = "exchanging the locations of data files", where.declared.per_node
        with self.agreement.round("members") as round:
            round.send(" ".join(members or ["-"]).encode())
            if self.coordinates:
                found = round.gather(self.timeout_s, phase)
                lowest: dict[bytes, int] = {}
                nodes = [lowest.setdefault(one, rank) for rank, one in enumerate(found)]
                leads = [nodes[rank] == rank if per_node else rank == 0 for rank in range(len(found))]
                if per_node and where.copies == 1:
                    self._nodes = np.array(nodes, np.int64)
                round.broadcast(b"same" if per_node or _are_alike(found) else b"", [b"leads" * one for one in leads])
            same = round.receive(self.timeout_s, phase)
            self.leads = round.own_reply() == b"leads"
        if not same:
            raise RanksDisagree(
                f"the locations of {where.url} are not the same for all ranks",
                subject=where.url,
                hint="give locations that all ranks share, by one path each; PerNode takes one of each node's own",
                phase=phase,
            )

    def _find(self, where: Store, wanted: str) -> tuple[Repo | None, str]:
        """Returns the repository there if it is the wanted one, else why not. The coordinator may have made it a moment
        ago."""
        found: list[Repo] = []
        wrong = ""

        def opens() -> bool:
            nonlocal wrong
            try:
                found.append(Repo.open(where))
            except NotARepository as error:
                wrong = error.message
            return bool(found)

        try:
            if not becomes_visible(opens, self.timeout_s, self.agreement.session.settings.clock):
                return None, wrong
        except TenutoError as error:
            return None, error.message
        id = found[0].id
        if id != wanted:
            return None, f"another repository lies there ({id[:8]}, and the coordinator's is {wanted[:8]})"
        return found[0], ""

    def agree_on_attempt(self, repo: Repo, find: Callable[[], tuple[Attempt, int]]) -> tuple[Attempt, int]:
        attempt, step = self._announced_attempt(repo, find)
        try:
            self.check_claim_visible(attempt)
        except BaseException:
            attempt.release()
            raise
        return attempt, step

    def _announced_attempt(self, repo: Repo, find: Callable[[], tuple[Attempt, int]]) -> tuple[Attempt, int]:
        with self.round("claim") as round:
            if not self.coordinates:
                number, _, record = round.receive(self.timeout_s, "the claim of the run").partition(b"\n")
                return announced(repo, record), int(number)
            attempt, step = find()
            try:
                round.broadcast(b"%d\n" % step + encode_attempt(attempt.record, attempt.repo.id))
            except BaseException:
                attempt.release()
                raise
            return attempt, step

    def check_claim_visible(self, attempt: Attempt) -> None:
        """Checks that each rank sees this claim of the run in its own store: a repository that was copied from node to
        node has the same id on each, and the claim on one. Raises RanksDisagree, on all ranks, where one does not see
        it, and what other waits for ranks raise."""
        wrong, clock = "", self.agreement.session.settings.clock
        if not self.coordinates and not becomes_visible(lambda: sees_claim(attempt), self.timeout_s, clock):
            wrong = (
                f"a copy lies there, without attempt {attempt.number} of run {attempt.run!r}, just claimed by rank 0"
            )
        self._same_place(attempt.repo.url, wrong, "looking for the claim of the run")

    def _same_place(self, place: str, wrong: str, phase: str) -> None:
        """Raises RanksDisagree, on all ranks, where `wrong` is not empty on one: what is wrong with `place` there."""
        with self.agreement.round("same place") as round:
            own = f"{place} on {socket.gethostname()}: {wrong}"
            verdict = round.vote(not wrong, own, self.timeout_s, phase)
        if not verdict:
            reasons = "; ".join(f"rank {rank}, {reason}" for rank, reason in sorted(verdict.reasons.items())[:8])
            raise RanksDisagree(
                f"{place} is not one location for all ranks ({reasons})",
                subject=place,
                hint=SHARE_ONE_PLACE,
                ranks=tuple(sorted(verdict.reasons)),
                phase=phase,
            )

    # -- saves that only some ranks know of ------------------------------------------------------------------------

    def completed(self, step: int, signal: str | None, *, ending: bool) -> str | None:
        """Notes that this rank completed `step`. Returns the signal that all ranks act upon at this step: one that came
        only here is first made known to the others, and training continues until then, or to its end."""
        if signal is not None:
            self._propose(f"{signal}{_CAME}")
        if step > self._step:
            self._step = step
            proposal = self.agreement.at(step, self.timeout_s)
            self._agreed = proposal.reason if proposal is not None else None
            self._requested &= proposal is None
        if self._agreed is not None and self._agreed.endswith(_CAME):
            return self._agreed.removesuffix(_CAME)
        return signal if ending else None

    def stops(self, wanted: bool) -> bool:
        self._wants_to_stop |= wanted
        if self._wants_to_stop and self._agreed != _STOPS:
            self._propose(_STOPS)
        return self._agreed == _STOPS

    def decide(
        self, policy: DividedPolicy, moment: Moment, history: SaveHistory, torn: Save | None, asked: str | None = None
    ) -> Decision:
        """Decides whether all ranks save this step. What the coordinator decides for all is saved at a later step, and
        so is what replaces a `torn` save, or what any rank was `asked` for."""
        agreed, self._agreed = self._agreed, None
        decision = policy.alike.decide(moment, history)
        new = history.last_saved_step is None or moment.step > history.last_saved_step
        if agreed is not None and new and not decision.save:
            decision = Decision(True, agreed)
        if not decision.save:  # else this save is what would be requested
            if asked is not None:
                self._propose(asked)
            if torn is not None and moment.step > torn.step:
                self._propose(f"in place of the torn save of step {torn.step}")
            if self.coordinates and (wanted := policy.by_one.decide(moment, history)).save:
                self._propose(wanted.reason)
        return decision

    def _propose(self, reason: str) -> None:
        """Requests a save, once until it comes. An agreed save that is still to come will do; not for a signal and for
        a stop, which all ranks act upon only where it is the reason of the save."""
        coming = self.agreement.agreed_save
        if coming is not None and (_ends(coming.reason) or not _ends(reason)):
            return
        if not self._requested:
            self._requested = True
            try:
                self.agreement.request_save(reason)
            except RanksError as error:
                self._requested = False
                self._emitter.emit(Warned(f"the other ranks could not be asked to save: {error.message}", self._run))

    def _behind(self, phase: str, ranks: Sequence[int], waited_s: float) -> None:
        if ranks:
            doing = self.agreement.session.watch.describe(ranks)
            self._emitter.emit(RanksBehind(self._run, phase, tuple(ranks), waited_s, rank_names(ranks), doing))

    # -- the end -------------------------------------------------------------------------------------------------------

    def broken_off(self, error: BaseException) -> None:
        """Notes the error that ends training here: the other ranks learn it when this one leaves."""
        self._gone = in_words(error)

    def leave(self, error: BaseException) -> None:
        """Leaves at once: ranks that wait for this one raise RankFailed."""
        self._left, self._gone = True, in_words(error)
        self.agreement.close(self._gone)

    def break_off(self, error: BaseException) -> None:
        """Leaves at once, where other ranks may have come to the end already: they raise RankFailed as well."""
        with self.agreement.round("end") as round:
            round.fail(in_words(error))
        self.leave(error)

    def part(self, timeout: float, *, well: bool) -> None:
        """Leaves; where training ended well, not before all ranks have: one of them may serve the key-value store."""
        if well:
            self.farewell(timeout)
        self.agreement.close(*([self._gone] if self._gone else []))

    def finish_on_all(self, phase: str) -> None:
        """Waits until all ranks have come to the end. Raises RankFailed, naming it, where one has failed on the way."""
        self._left = True
        try:
            with self.agreement.round("end") as round:
                round.all_gather(b"", RESTORE_TIMES * self.timeout_s, phase)
        except RankStoreLost as error:  # it may go with the first rank that is done
            self._emitter.emit(Warned(f"not all ranks have reached the end: {error.message}", self._run))

    def farewell(self, timeout: float) -> None:
        """Waits, once, until all ranks have come to the end or it is clear that some will not."""
        if not self._left and self.world_size > 1:
            self._left = True
            try:
                with self.agreement.round("end") as round:
                    round.all_gather(b"", min(timeout, self.timeout_s, FAREWELL_S), "the end of training")
            except RanksError as error:
                self._gone = self._gone or error.message
                self._emitter.emit(Warned(f"not all ranks have reached the end: {error.message}", self._run))


def _ends(reason: str) -> bool:
    return reason == _STOPS or reason.endswith(_CAME)


def _are_alike(members: Sequence[bytes]) -> bool:
    """Returns whether all ranks have joined the same members, not counting those that a rank cannot reach."""
    columns = zip(*(one.split(b" ") for one in members), strict=True)
    return all(len(set(column) - {b""}) <= 1 for column in columns)


@contextmanager
def leave_on_error(group: RankGroup) -> Iterator[None]:
    """Makes this process leave the group where the block raises: the others learn it at once."""
    try:
        yield
    except BaseException as error:
        group.leave(error)
        raise


def training_group(
    ranks: Ranks,
    where: Where,
    run: str,
    emitter: Emitter,
    timeout_s: float,
    *,
    memory: SavePolicy | None,
    writers: Strategy,
    facts: Mapping[str, str],
    before_create: BeforeCreate | None = None,
    silence_s: float = SILENCE_S,
) -> tuple[RankGroup, Repo]:
    """Returns the group that trains the run, and the repository, which is created where there is none
    (`before_create`: as for `Repo.create_or_open`). Raises what `JobGroup.meet` does, RanksDisagree where `facts` are
    not equal on all ranks, and UsageError for what several ranks cannot do together."""
    if ranks.world_size == 1:
        return SoloGroup(), Repo.create_or_open(open_store(where), before_create=before_create)
    if memory is not None and not memory.alike:
        raise UsageError(
            f"memory={memory!r} does not work with several ranks",
            subject=f"memory={memory!r}",
            hint="memory=every(steps=…): all keep the same steps",
        )
    return JobGroup.meet(
        ranks,
        where,
        run,
        emitter,
        timeout_s,
        facts=facts,
        writers=writers,
        before_create=before_create,
        silence_s=silence_s,
    )


# --------------------------------------------------------------------------------------------------
# The ranks of a job that meet for a single save or load.


@contextmanager
def joined_group(
    ranks: Ranks,
    where: Where,
    run: str,
    emitter: Emitter,
    timeout_s: float,
    *,
    call: Literal["save", "load"],
    facts: Mapping[str, str],
    find: Callable[[Store], Repo] | None = None,
    writers: Strategy = "balanced",
) -> Iterator[tuple[JobGroup, Repo]]:
    """Yields this process among the ranks, and the repository. The other ranks learn what the block raises. Raises what
    `JobGroup.meet` does, and RankFailed for a rank that could not set what it had loaded: a save is committed by then,
    but a load has come to nothing unless all ranks have what they asked for."""
    try:
        group, repo = JobGroup.meet(
            ranks, where, run, emitter, timeout_s, call=call, find=find, facts=facts, writers=writers
        )
    except RanksMissing as error:
        hint = f"every rank of the job calls tenuto.{call}; one that is to {call} by itself: ranks=tenuto.Solo()"
        raise RanksMissing(
            error.message, subject=error.subject, hint=hint, ranks=error.ranks, phase=error.phase
        ) from error
    with leave_on_error(group):
        yield group, repo
        if call == "load":
            group.finish_on_all("setting what was loaded")
    group.part(timeout_s, well=True)
