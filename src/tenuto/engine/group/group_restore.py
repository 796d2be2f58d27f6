"""Restoring as one of several ranks: the coordinator chooses, all match it with what they hold, read, and vote."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from tenuto.crashpoints import crashpoint
from tenuto.engine.group.node_peers import NodePeers
from tenuto.engine.group.pack_handover import dealt, hand_over, is_there, lacking
from tenuto.engine.group.visibility import awaited
from tenuto.engine.read.choose import Matched, Prepare, RestoreResult, as_damage, choose, chosen, exactly, match
from tenuto.engine.read.node_share import NodeSharedReads, WindowTimeouts
from tenuto.engine.save.rank_group import RESTORE_TIMES
from tenuto.errors import CheckpointNotFound, CorruptionError, RankFailed, RanksMissing, in_words
from tenuto.events import CandidateSkipped, Emitter, RestoredEvent
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Json, Manifest
from tenuto.model.timing import RankTimings
from tenuto.ranks.contract import VoteResult
from tenuto.ranks.round import REASON, Round
from tenuto.repo.format.manifest import Aborted, decode_manifest
from tenuto.repo.replicated.places import places_of
from tenuto.repo.repository import Repo
from tenuto.state.restore.match import refuse_unmatched
from tenuto.state.restore.unmatched import Unmatched, unmatched_by_all

if TYPE_CHECKING:
    from tenuto.engine.group.group import JobGroup

# --------------------------------------------------------------------------------------------------
# How a restore goes on each rank of a job, told in two rounds: whether the checkpoint fits what the rank holds, before
# any of it is read; and whether it could be read, and how long that took.


@dataclass(slots=True)
class RankOutcome:
    """On one rank. `reason`: why it could not restore its part; empty where it has. `match_s`: until the checkpoint was
    matched with what the rank holds, `read_s`: from the beginning of reading until its `nbytes` were there, verified,
    without `wait_s`, waiting for what its neighbours ask for."""

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
        said = canonical_json.loads(data)
        *took, nbytes = said["took"]
        match_s, read_s, wait_s = (one / 1e6 for one in took)
        return cls(str(said["reason"]), match_s, read_s, wait_s, int(nbytes))


def fits(
    round: Round, reason: str, left_over: Unmatched | None, deadline_s: float, phase: str
) -> tuple[VoteResult, bytes]:
    """On every rank, each with the `reason` why it could not match the checkpoint, empty where it could, and what it
    leaves over: the same verdict on all, and what no rank takes, as `left_by_all` tells it. Raises what `Topic.collect`
    does."""
    round.send(_joined({"reason": _shown(reason)}, b"" if left_over is None else left_over.encode()))
    if round.coordinates:
        said = [_divided(one) for one in round.gather(deadline_s, phase)]
        reasons = _reasons([str(head["reason"]) for head, _ in said])
        round.broadcast(_joined({"reasons": reasons}, b"" if reasons else unmatched_by_all([left for _, left in said])))
    head, left = _divided(round.receive(deadline_s, phase))
    return _verdict(head["reasons"]), left


def refuse_what_none_takes(own: Unmatched | None, left: bytes) -> None:
    """StateMismatch, the same on all ranks, for what none of them takes."""
    if left and own is not None:
        refuse_unmatched(own.named(left))


def agreed(round: Round, own: RankOutcome, deadline_s: float, phase: str) -> tuple[VoteResult, RankTimings | None]:
    """On every rank, each with its own outcome: the same verdict on all, and where the time went on each; None where
    some could not. Raises what `Topic.collect` does."""
    round.send(own.encode())
    if round.coordinates:
        said = [RankOutcome.decode(one) for one in round.gather(deadline_s, phase)]
        reasons = _reasons([one.reason for one in said])
        round.broadcast(canonical_json.dumps({"reasons": reasons, "timing": None if reasons else _timing(said)}))
    heard = canonical_json.loads(round.receive(deadline_s, phase))
    return _verdict(heard["reasons"]), RankTimings.read(heard["timing"])


def _timing(said: Sequence[RankOutcome]) -> Json:
    parts = {
        "match_s": [one.match_s for one in said],
        "read_s": [one.read_s for one in said],
        "wait_s": [one.wait_s for one in said],
        "seconds": [one.match_s + one.read_s for one in said],
        "bytes": [float(one.nbytes) for one in said],
    }
    return RankTimings.of_parts(len(said), parts).told()


def _shown(reason: str) -> str:
    return reason[:REASON].encode("utf-8", "replace").decode()  # it may quote what is no text


def _reasons(said: Sequence[str]) -> dict[str, str]:
    return {str(rank): reason for rank, reason in enumerate(said) if reason}


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
TOLD_BYTES: Final = 64 << 10
"""A longer manifest is not told: each rank reads it. That of thousands of ranks, told to each of them, does not fit
through the one place where they meet."""
PATIENCE_S: Final = 30.0
"""A neighbour that has read nothing for so long is not waited for: each rank reads for itself then."""


class GroupRestore:
    """The ranks of one job, restoring one run. Each of them calls the same methods in the same order."""

    def __init__(self, repo: Repo, run: str, prepare: Prepare, *, group: JobGroup, emitter: Emitter) -> None:
        self.group = group
        self._repo = repo
        self._run = run
        self._prepare = prepare
        self._emitter = emitter
        self._deadline_s = RESTORE_TIMES * group.timeout_s
        self._met = False
        self._neighbours: NodePeers | None = None
        self._round = 0
        self.raised_by_all = False
        """Whether the last restore has ended by a vote that all have heard: nobody waits for more of it."""

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
        """What is said here is said in one topic for each candidate; where nothing is left to try, in one more."""
        try:
            if resume_from == "latest":
                result, _ = choose(self._repo, self._run, self._tried, self._emitter, withdrawn=withdrawn)
            else:
                result = exactly(self._repo, chosen(self._repo, self._run, resume_from), self._tried)
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

    def _tried(self, id: CheckpointId) -> RestoreResult:
        data = self._repo.manifest_bytes(id)
        mark = hashlib.sha256(data).hexdigest()
        told = data if len(data) <= TOLD_BYTES else b""
        with self._open_round() as round:
            round.broadcast(b"\n".join([TRY, canonical_json.dumps([id.run, id.attempt, id.step, mark]), told]))
        return self._read(id, lambda: data)

    # -- the others ----------------------------------------------------------------------------------------------------

    def _follow(self) -> RestoreResult | None:
        while True:
            with self._open_round() as round:
                heard = round.receive(self._deadline_s, "the choice of a checkpoint")
            if heard == NONE:
                return None
            _, name, data = heard.split(b"\n", 2)
            run, attempt, step, mark = canonical_json.loads(name)
            id = CheckpointId(run, attempt, step)
            try:
                return self._read(id, partial(self._found, id, mark, data))
            except CorruptionError as error:
                self._emitter.emit(CandidateSkipped(id, error.message))

    def _found(self, id: CheckpointId, mark: str, told: bytes) -> bytes:
        """The manifest as it was told, or as this rank finds it; CorruptionError where it is not the coordinator's."""
        data = told or self._repo.manifest_bytes(id)
        if hashlib.sha256(data).hexdigest() != mark:
            raise CorruptionError(f"the manifest of {id} is not the one that the coordinator has read", subject=str(id))
        return data

    # -- every rank ----------------------------------------------------------------------------------------------------

    def _open_round(self) -> Round:
        return self.group.agreement.round("restore")

    def _read(self, id: CheckpointId, manifest: Callable[[], bytes]) -> RestoreResult:
        """Reads this rank's part once the checkpoint fits all ranks, votes, and sets what is plain once all have voted
        for it. CorruptionError where some rank found it damaged, or gone; StateMismatch on all where none takes some of
        it; what else went wrong on this rank, or RankFailed where it did on another."""
        node = self._with_peers()
        try:
            return self._read_with_peers(id, manifest, node)
        finally:
            if node is not None:
                node.close()

    def _with_peers(self) -> NodeSharedReads | None:
        """The ranks of this node, for one more checkpoint that all read."""
        if not self._met:
            self._met = True
            self._neighbours = NodePeers.meet(self.group.agreement, self._deadline_s)
        self._round += 1
        if self._neighbours is None:
            return None
        patience_s = min(PATIENCE_S, self.group.timeout_s / 4)
        return self._neighbours.reads(self._round, timing=WindowTimeouts(patience_s), emitter=self._emitter)

    def _read_with_peers(
        self, id: CheckpointId, told: Callable[[], bytes], node: NodeSharedReads | None
    ) -> RestoreResult:
        began = time.perf_counter()
        outcome = RankOutcome()
        manifest, matched = self._matched(id, told, outcome)
        if self.group.spread:
            self._hand_over(id, manifest, matched)
        own: BaseException | None = None
        began_reading = time.perf_counter()
        try:
            outcome.nbytes = matched.read(node)
            outcome.wait_s = 0.0 if node is None else node.waited_s
            outcome.read_s = max(time.perf_counter() - began_reading - outcome.wait_s, 0.0)
        except Exception as error:  # noqa: BLE001 - told to all, and raised here after the vote
            own = as_damage(error)
            outcome.reason = _reason(own)
            if node is not None:
                node.absent()
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
        """What a rank needs that only another one's node has is put into the home by that one."""
        places, own = places_of(self._repo.store), None
        assert places is not None, "the ranks agreed on it"
        names = lacking(self._open_round(), places, matched.needs, self._deadline_s)
        if not names:
            return
        ours = dealt(self._open_round(), places, names, self.group.rank, self._deadline_s)
        try:
            hand_over(self._repo, manifest, ours)
        except Exception as error:  # noqa: BLE001 - told to all, and raised here after the vote
            own = as_damage(error)
        with self._open_round() as round:
            self.raised_by_all = True
            reason = "" if own is None else _reason(own)
            verdict = round.vote(own is None, reason, self._deadline_s, f"handing on packs of {id}")
        self._check(verdict, own, id)
        self.raised_by_all = False
        # A network file system remembers for a while that a name was absent: what stays so, the reading tells.
        awaited(lambda: is_there(places, id, names), self.group.timeout_s, self.group.agreement.session.settings.clock)

    def _matched(self, id: CheckpointId, told: Callable[[], bytes], outcome: RankOutcome) -> tuple[Manifest, Matched]:
        """The checkpoint, matched on every rank with what it holds: where it does not fit some rank, or all leave some
        of it over, nothing of any target has changed."""
        began = time.perf_counter()
        found: tuple[Manifest, Matched] | None = None
        own: BaseException | None = None
        rank, of = self.group.rank, self.group.world_size
        try:
            manifest = _manifest(told(), id)
            found = manifest, match(self._repo, manifest, self._prepare, rank=rank, of=of, emitter=self._emitter)
            outcome.match_s = time.perf_counter() - began
        except Exception as error:  # noqa: BLE001 - told to all, and raised here after they have heard it
            own = as_damage(error)
        left_over = None if found is None else found[1].prepared.unmatched
        reason = "" if own is None else _reason(own)
        with self._open_round() as round:
            self.raised_by_all = True
            verdict, left = fits(round, reason, left_over, self._deadline_s, f"the match of {id}")
        self._check(verdict, own, id)
        assert found is not None
        refuse_what_none_takes(left_over, left)
        self.raised_by_all = False
        return found

    def _check(self, verdict: VoteResult, own: BaseException | None, id: CheckpointId) -> None:
        """Raises where some rank is against: what was raised on this one, RankFailed for what was on another, or
        CorruptionError where all that is wrong is that the checkpoint is damaged, or gone."""
        if verdict:
            return
        if own is not None and not isinstance(own, _PASSED_OVER):
            raise own
        reasons = verdict.reasons
        fatal = {rank: said for rank, said in reasons.items() if not said.startswith(DAMAGED)}
        if fatal:
            rank, said = min(fatal.items())
            raise RankFailed(
                f"rank {rank} cannot restore {id}: {said}",
                subject=f"rank {rank}",
                ranks=tuple(fatal),
                phase="restore",
                hint=f"look at the log of rank {rank}",
            )
        rank, said = min(reasons.items())
        self.raised_by_all = False  # all wait for the next choice
        raise CorruptionError(f"{said.removeprefix(DAMAGED)} (found by rank {rank})", subject=str(id)) from own


def _reason(error: BaseException) -> str:
    return (DAMAGED if isinstance(error, _PASSED_OVER) else "") + in_words(error)


def _manifest(data: bytes, id: CheckpointId) -> Manifest:
    found = decode_manifest(data, id)
    assert not isinstance(found, Aborted), "chosen"
    return found
