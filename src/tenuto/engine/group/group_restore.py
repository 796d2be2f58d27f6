"""Restoring as one of several ranks: the coordinator chooses, all match it with what they hold, read, and vote."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from tenuto.crashpoints import crashpoint
from tenuto.engine.group.rounds import becomes_visible
from tenuto.engine.read.choose import Matched, Prepare, RestoreResult, as_damage, choose, exactly, match
from tenuto.engine.read.copy_packs import copy_packs
from tenuto.engine.read.node_share import NodePeers, NodeSharedReads
from tenuto.engine.save.rank_group import RESTORE_TIMES
from tenuto.errors import CheckpointNotFound, CorruptionError, RankFailed, RanksMissing, TenutoError, in_words
from tenuto.events import CandidateSkipped, Emitter, RestoredEvent
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Json, Manifest
from tenuto.model.timing import RankTimings
from tenuto.ranks.contract import VoteResult
from tenuto.ranks.round import REASON, Round
from tenuto.repo.format.manifest import Aborted, decode_manifest
from tenuto.repo.lineage import resolve
from tenuto.repo.replicated.places import places_of
from tenuto.repo.replicated.replica import exists
from tenuto.repo.replicated.replicated_store import ReplicatedStore
from tenuto.repo.repository import Repo
from tenuto.state.restore.match import Unmatched, refuse_unmatched, unmatched_by_all

if TYPE_CHECKING:
    from tenuto.engine.group.group import JobGroup


# --------------------------------------------------------------------------------------------------
# Packs that some rank needs and does not find, and that lie on another rank's node: that rank puts them into the home,
# for all. Where every rank finds what it needs, this costs one round.

NOWHERE: Final = -1


def missing_packs(
    round: Round, places: ReplicatedStore, needs: Callable[[], Sequence[str]], deadline_s: float
) -> list[str]:
    """Returns the packs that some rank needs and does not find, the same on every rank. Raises what `Round.gather`
    does."""
    phase = "telling which packs are not found"
    try:
        missed = [name for name in needs() if not places.has(name)]
    except TenutoError:
        missed = []  # reading them meets the error again, and reports it
    with round:
        round.send(canonical_json.dumps(missed))
        if round.coordinates:
            names = {name for one in round.gather(deadline_s, phase) for name in canonical_json.loads(one)}
            round.broadcast(canonical_json.dumps(sorted(names)))
        return [str(name) for name in canonical_json.loads(round.receive(deadline_s, phase))]


def packs_to_hand_over(
    round: Round, places: ReplicatedStore, names: Sequence[str], rank: int, deadline_s: float
) -> list[str]:
    """Returns which of `names` this rank has to put into the home. Raises CorruptionError, on all ranks, where no rank
    has one of them."""
    phase = "telling who has the packs that are not found"
    here = [number for number, name in enumerate(names) if any(exists(store, name) for store in places.others)]
    with round:
        round.send(canonical_json.dumps(here))
        if round.coordinates:
            givers = [NOWHERE] * len(names)
            for one, numbers in reversed(list(enumerate(round.gather(deadline_s, phase)))):
                for number in canonical_json.loads(numbers):
                    givers[number] = one
            round.broadcast(canonical_json.dumps(givers))
        givers = canonical_json.loads(round.receive(deadline_s, phase))
    if NOWHERE in givers:
        name = names[givers.index(NOWHERE)]
        raise CorruptionError(
            f"{name} is on no node of this job, nor in {places.url}: it was on one that is not here, or is lost",
            subject=name,
            object=name,
        )
    return [name for name, giver in zip(names, givers, strict=True) if giver == rank]


def hand_over(repo: Repo, manifest: Manifest, names: Sequence[str]) -> None:
    """Copies these packs from this node into the home, with a warning for each. Raises what `copy_packs` does."""
    places = places_of(repo.store)
    assert places is not None, "no other place has anything"

    def warn(name: str, nbytes: int) -> None:
        places.warn(f"{name} ({nbytes / 2**20:,.1f} MiB) is put into {places.url}, for ranks that do not find it")

    if names:
        copy_packs(repo, manifest, frozenset(names), places.home, warn)


def in_home(places: ReplicatedStore, id: CheckpointId, names: Sequence[str]) -> bool:
    """Returns whether the home shows these packs. Lists them first, which makes a network file system look again."""
    there = places.home.children(id.directory).objects
    return all(name.rpartition("/")[2] in there and exists(places.home, name) for name in names)


# --------------------------------------------------------------------------------------------------
# The two rounds of a restore: whether the checkpoint fits what each rank holds, before any of it is read; and whether
# it could be read, and how long that took.


@dataclass(slots=True)
class RankOutcome:
    """The outcome on one rank.

    reason: why it could not restore its part; empty where it has.
    match_s: until the checkpoint was matched with what the rank holds.
    read_s: from the beginning of reading until its `nbytes` were there, verified, without `wait_s`.
    wait_s: until the requests of the other ranks of the node were there.
    """

    reason: str = ""
    match_s: float = 0.0
    read_s: float = 0.0
    wait_s: float = 0.0
    nbytes: int = 0

    def encode(self) -> bytes:
        took = [*(round(one * 1e6) for one in (self.match_s, self.read_s, self.wait_s)), self.nbytes]
        return canonical_json.dumps({"reason": _shown(self.reason), "took": took})

    @classmethod
    def decode(cls, data: bytes) -> RankOutcome:
        values = canonical_json.loads(data)
        *took, nbytes = values["took"]
        match_s, read_s, wait_s = (one / 1e6 for one in took)
        return cls(str(values["reason"]), match_s, read_s, wait_s, int(nbytes))


def fits(
    round: Round, reason: str, left_over: Unmatched | None, deadline_s: float, phase: str
) -> tuple[VoteResult, bytes]:
    """Exchanges why each rank could not match the checkpoint (empty where it could) and what it leaves over. Returns,
    the same on all ranks, the verdict and what no rank takes, as `unmatched_by_all` encodes it. Raises what
    `Round.gather` does."""
    round.send(_joined({"reason": _shown(reason)}, b"" if left_over is None else left_over.encode()))
    if round.coordinates:
        found = [_divided(one) for one in round.gather(deadline_s, phase)]
        reasons = _reasons([str(head["reason"]) for head, _ in found])
        left = b"" if reasons else unmatched_by_all([left for _, left in found])
        round.broadcast(_joined({"reasons": reasons}, left))
    head, left = _divided(round.receive(deadline_s, phase))
    return _verdict(head["reasons"]), left


def agreed(round: Round, own: RankOutcome, deadline_s: float, phase: str) -> tuple[VoteResult, RankTimings | None]:
    """Exchanges the outcomes of all ranks. Returns, the same on all, the verdict and where the time went on each; None
    where some could not restore. Raises what `Round.gather` does."""
    round.send(own.encode())
    if round.coordinates:
        outcomes = [RankOutcome.decode(one) for one in round.gather(deadline_s, phase)]
        reasons = _reasons([one.reason for one in outcomes])
        round.broadcast(canonical_json.dumps({"reasons": reasons, "timing": None if reasons else _timing(outcomes)}))
    answer = canonical_json.loads(round.receive(deadline_s, phase))
    return _verdict(answer["reasons"]), RankTimings.read(answer["timing"])


def _timing(outcomes: Sequence[RankOutcome]) -> Json:
    parts = {
        "match_s": [one.match_s for one in outcomes],
        "read_s": [one.read_s for one in outcomes],
        "wait_s": [one.wait_s for one in outcomes],
        "seconds": [one.match_s + one.read_s for one in outcomes],
        "bytes": [float(one.nbytes) for one in outcomes],
    }
    return RankTimings.of_parts(len(outcomes), parts).to_json()


def _shown(reason: str) -> str:
    return reason[:REASON].encode("utf-8", "replace").decode()  # it may quote what is no text


def _reasons(reasons: Sequence[str]) -> dict[str, str]:
    return {str(rank): reason for rank, reason in enumerate(reasons) if reason}


def _verdict(reasons: Json) -> VoteResult:
    return VoteResult({int(rank): str(reason) for rank, reason in reasons.items()})


def _joined(head: Json, data: bytes) -> bytes:
    return canonical_json.dumps(head) + b"\n" + data


def _divided(raw: bytes) -> tuple[Json, bytes]:
    head, _, data = raw.partition(b"\n")
    return canonical_json.loads(head), data


TRY, NONE = b"try", b"none"
DAMAGED: Final = "damaged: "
_PASSED_OVER: Final = (CorruptionError, CheckpointNotFound)
BROADCAST_BYTES: Final = 64 << 10
"""A longer manifest is not broadcast; each rank reads it. That of thousands of ranks, sent to each of them, is too much
for one key-value store."""


class GroupRestore:
    """The ranks of one job, restoring one run. Each of them calls the same methods in the same order."""

    def __init__(self, repo: Repo, run: str, prepare: Prepare, *, group: JobGroup, emitter: Emitter) -> None:
        self.group = group
        self._repo = repo
        self._run = run
        self._prepare = prepare
        self._emitter = emitter
        self._deadline_s = RESTORE_TIMES * group.timeout_s
        self._peers_known = False
        self._peers: NodePeers | None = None
        self._round = 0
        self.raised_by_all = False
        """Whether the last restore has ended by a vote that all ranks have received: no rank waits for more of it."""

    def restore(self, step: int | str, *, withdrawn: Container[int] = frozenset()) -> RestoreResult | None:
        """Restores what the coordinator chooses; None, on all ranks, where the run has no checkpoint. `withdrawn`: the
        coordinator's, as `walk` has it."""
        self.raised_by_all = False
        return self._choose(step, withdrawn) if self.group.coordinates else self._follow()

    def resume(self, resume_from: int | str | None, *, withdrawn: Container[int]) -> RestoreResult | None:
        """Restores at the start of training; None where that starts afresh."""
        crashpoint("repository opened, nothing chosen yet")
        return None if resume_from is None else self.restore(resume_from, withdrawn=withdrawn)

    # -- the coordinator -----------------------------------------------------------------------------------------------

    def _choose(self, resume_from: int | str, withdrawn: Container[int]) -> RestoreResult | None:
        """Opens one round for each candidate, and one more where nothing is left to try."""
        try:
            if resume_from == "latest":
                result, _ = choose(self._repo, self._run, self._broadcast_and_read, self._emitter, withdrawn=withdrawn)
            else:
                result = exactly(self._repo, resolve(self._repo, self._run, resume_from), self._broadcast_and_read)
        except (RankFailed, RanksMissing):
            raise
        except BaseException as error:
            if not self.raised_by_all:
                with self._open_round() as round:
                    round.fail(in_words(error))
            raise
        if result is None:
            with self._open_round() as round:
                round.broadcast(NONE)
        return result

    def _broadcast_and_read(self, id: CheckpointId) -> RestoreResult:
        data = self._repo.manifest_bytes(id)
        mark = hashlib.sha256(data).hexdigest()
        copy = data if len(data) <= BROADCAST_BYTES else b""
        with self._open_round() as round:
            round.broadcast(b"\n".join([TRY, canonical_json.dumps([id.run, id.attempt, id.step, mark]), copy]))
        return self._read(id, lambda: data)

    # -- the others ----------------------------------------------------------------------------------------------------

    def _follow(self) -> RestoreResult | None:
        while True:
            with self._open_round() as round:
                message = round.receive(self._deadline_s, "the choice of a checkpoint")
            if message == NONE:
                return None
            _, name, data = message.split(b"\n", 2)
            run, attempt, step, mark = canonical_json.loads(name)
            id = CheckpointId(run, attempt, step)
            try:
                return self._read(id, partial(self._found, id, mark, data))
            except CorruptionError as error:
                self._emitter.emit(CandidateSkipped(id, error.message))

    def _found(self, id: CheckpointId, mark: str, copy: bytes) -> bytes:
        """Returns the manifest that was broadcast, or the one this rank finds. Raises CorruptionError where it is not
        the coordinator's."""
        data = copy or self._repo.manifest_bytes(id)
        if hashlib.sha256(data).hexdigest() != mark:
            raise CorruptionError(f"the manifest of {id} is not the one that the coordinator has read", subject=str(id))
        return data

    # -- every rank ----------------------------------------------------------------------------------------------------

    def _open_round(self) -> Round:
        return self.group.agreement.round("restore")

    def _read(self, id: CheckpointId, manifest: Callable[[], bytes]) -> RestoreResult:
        """Reads this rank's part once the checkpoint fits all ranks, votes, and sets plain values once all have voted
        for it. Raises CorruptionError where some rank found it damaged, or gone; StateMismatch on all ranks where none
        takes some of it; any other error of this rank, or RankFailed for one of another."""
        node = self._with_peers()
        try:
            return self._read_with_peers(id, manifest, node)
        finally:
            if node is not None:
                node.close()

    def _with_peers(self) -> NodeSharedReads | None:
        """Returns the shared reads of this node's ranks for one more checkpoint."""
        if not self._peers_known:
            self._peers_known = True
            self._peers = NodePeers.meet(self.group.agreement, self._deadline_s)
        self._round += 1
        if self._peers is None:
            return None
        # A rank of the node that has read nothing for as long as a stopped one is waited for is not waited for either.
        patience_s = min(self.group.agreement.session.settings.dead_after_s, self.group.timeout_s / 4)
        return self._peers.reads(self._round, patience_s=patience_s, emitter=self._emitter)

    def _read_with_peers(
        self, id: CheckpointId, data: Callable[[], bytes], node: NodeSharedReads | None
    ) -> RestoreResult:
        began = time.perf_counter()
        outcome = RankOutcome()
        manifest, matched = self._matched(id, data, outcome)
        if self.group.spread:
            self._hand_over(id, manifest, matched)
        own: BaseException | None = None
        began_reading = time.perf_counter()
        try:
            outcome.nbytes = matched.read(node)
            outcome.wait_s = 0.0 if node is None else node.waited_s
            outcome.read_s = max(time.perf_counter() - began_reading - outcome.wait_s, 0.0)
        except Exception as error:  # noqa: BLE001 - sent to all, and raised here after the vote
            own = as_damage(error)
            outcome.reason = _reason(own)
            if node is not None:
                node.leave()
        crashpoint("part restored, not yet voted for")
        with self._open_round() as round:
            self.raised_by_all = True
            verdict, ranks = agreed(round, outcome, self._deadline_s, f"the restore of {id}")
        self._check(verdict, own, id)
        self.raised_by_all = False
        crashpoint("restore voted for, run not yet claimed")
        state = matched.prepared.apply()
        seconds = time.perf_counter() - began
        self._emitter.emit(RestoredEvent(id, outcome.nbytes, seconds, manifest.content, ranks))
        return RestoreResult(id, manifest, state, matched.prepared.report, outcome.nbytes, seconds, ranks=ranks)

    def _hand_over(self, id: CheckpointId, manifest: Manifest, matched: Matched) -> None:
        """Puts into the home what some rank needs and only this rank's node has."""
        places, own = places_of(self._repo.store), None
        assert places is not None, "the ranks agreed on it"
        names = missing_packs(self._open_round(), places, matched.needs, self._deadline_s)
        if not names:
            return
        ours = packs_to_hand_over(self._open_round(), places, names, self.group.rank, self._deadline_s)
        try:
            hand_over(self._repo, manifest, ours)
        except Exception as error:  # noqa: BLE001 - sent to all, and raised here after the vote
            own = as_damage(error)
        with self._open_round() as round:
            self.raised_by_all = True
            reason = "" if own is None else _reason(own)
            verdict = round.vote(own is None, reason, self._deadline_s, f"handing on packs of {id}")
        self._check(verdict, own, id)
        self.raised_by_all = False
        # A network file system remembers for a while that a name was absent; what stays so, reading reports.
        becomes_visible(
            lambda: in_home(places, id, names), self.group.timeout_s, self.group.agreement.session.settings.clock
        )

    def _matched(self, id: CheckpointId, data: Callable[[], bytes], outcome: RankOutcome) -> tuple[Manifest, Matched]:
        """Matches the checkpoint on every rank with what it holds. Where it does not fit some rank, or all leave some
        of it over, nothing of any target has changed."""
        began = time.perf_counter()
        found: tuple[Manifest, Matched] | None = None
        own: BaseException | None = None
        rank, of = self.group.rank, self.group.world_size
        try:
            manifest = _manifest(data(), id)
            found = manifest, match(self._repo, manifest, self._prepare, rank=rank, of=of, emitter=self._emitter)
            outcome.match_s = time.perf_counter() - began
        except Exception as error:  # noqa: BLE001 - sent to all, and raised here after the vote
            own = as_damage(error)
        left_over = None if found is None else found[1].prepared.unmatched
        reason = "" if own is None else _reason(own)
        with self._open_round() as round:
            self.raised_by_all = True
            verdict, left = fits(round, reason, left_over, self._deadline_s, f"the match of {id}")
        self._check(verdict, own, id)
        assert found is not None
        if left and left_over is not None:
            refuse_unmatched(left_over.named(left))
        self.raised_by_all = False
        return found

    def _check(self, verdict: VoteResult, own: BaseException | None, id: CheckpointId) -> None:
        """Raises where some rank is against: this rank's own error, RankFailed for another's, or CorruptionError where
        the only reason is that the checkpoint is damaged, or gone."""
        if verdict:
            return
        if own is not None and not isinstance(own, _PASSED_OVER):
            raise own
        reasons = verdict.reasons
        fatal = {rank: reason for rank, reason in reasons.items() if not reason.startswith(DAMAGED)}
        if fatal:
            rank, reason = min(fatal.items())
            raise RankFailed(
                f"rank {rank} cannot restore {id}: {reason}",
                subject=f"rank {rank}",
                ranks=tuple(fatal),
                phase="restore",
                hint=f"look at the log of rank {rank}",
            )
        rank, reason = min(reasons.items())
        self.raised_by_all = False  # all wait for the next choice
        raise CorruptionError(f"{reason.removeprefix(DAMAGED)} (found by rank {rank})", subject=str(id)) from own


def _reason(error: BaseException) -> str:
    return (DAMAGED if isinstance(error, _PASSED_OVER) else "") + in_words(error)


def _manifest(data: bytes, id: CheckpointId) -> Manifest:
    found = decode_manifest(data, id)
    assert not isinstance(found, Aborted), "chosen"
    return found
