"""Restoring as one of several ranks: the coordinator chooses, all match it with what they hold, read, and vote."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from tenuto.crashpoints import crashpoint
from tenuto.engine.group.hand_over import HandOver
from tenuto.engine.read.choose import Matched, Prepare, RestoreResult, Skipped, as_damage, choose, exactly, match
from tenuto.engine.read.local_state import LocalState
from tenuto.engine.read.node_share import NodePeers, NodeSharedReads, here, peers_of_each
from tenuto.engine.save.rank_group import RESTORE_TIMES
from tenuto.errors import CheckpointNotFound, CorruptionError, RankFailed, RanksMissing, in_words
from tenuto.events import CandidateSkipped, Emitter, RestoredEvent
from tenuto.model import canonical_json
from tenuto.model.canonical_json import tag_number, untag_number
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Json, Manifest
from tenuto.model.timing import RankTimings
from tenuto.ranks.contract import VoteResult
from tenuto.ranks.round import REASON, Round
from tenuto.repo.format.manifest import Aborted, decode_manifest
from tenuto.repo.lineage import resolve
from tenuto.repo.notes import noted_metrics
from tenuto.repo.replicated.places import places_of
from tenuto.repo.repository import Repo
from tenuto.state.restore.match import Unmatched, refuse_unmatched, unmatched_by_all

if TYPE_CHECKING:
    from tenuto.engine.group.group import JobGroup


# --------------------------------------------------------------------------------------------------
# The two rounds of a restore: whether the checkpoint fits what each rank holds, before any of it is read, and which
# ranks share a node; and whether it could be read, and how long that took.


@dataclass(slots=True)
class RankOutcome:
    """The outcome on one rank.

    reason: why it could not restore its part; empty where it has.
    match_s: until the checkpoint was matched with what the rank holds.
    read_s: from the beginning of reading until its `nbytes` were there, verified, without `wait_s`.
    wait_s: until the requests of the other ranks of the node were there.
    memory: how many of the bytes it had in its own memory.
    """

    reason: str = ""
    match_s: float = 0.0
    read_s: float = 0.0
    wait_s: float = 0.0
    nbytes: int = 0
    memory: int = 0

    def encode(self) -> bytes:
        took = [*(round(one * 1e6) for one in (self.match_s, self.read_s, self.wait_s)), self.nbytes, self.memory]
        return canonical_json.dumps({"reason": _shown(self.reason), "took": took})

    @classmethod
    def decode(cls, data: bytes) -> RankOutcome:
        values = canonical_json.loads(data)
        *took, nbytes, memory = values["took"]
        match_s, read_s, wait_s = (one / 1e6 for one in took)
        return cls(str(values["reason"]), match_s, read_s, wait_s, int(nbytes), int(memory))


def fits(
    round: Round, reason: str, left_over: Unmatched | None, where: Json, *, deadline_s: float, phase: str
) -> tuple[VoteResult, bytes, bytes | None]:
    """Exchanges why each rank could not match the checkpoint (empty where it could), what it leaves over, and `where`
    it runs: None on all ranks once they have told that. Returns, the same on all ranks, the verdict and what no rank
    takes, as `unmatched_by_all` encodes it; and this rank's part of `peers_of_each`. Raises what `Round.gather` does.
    """
    own = {"reason": _shown(reason), "where": where}
    round.send(_joined(own, b"" if left_over is None else left_over.encode()))
    if round.coordinates:
        found = [_divided(one) for one in round.gather(deadline_s, phase)]
        reasons = _reasons([str(head["reason"]) for head, _ in found])
        left = b"" if reasons else unmatched_by_all([left for _, left in found])
        peers = [] if where is None else peers_of_each([head["where"] for head, _ in found])
        round.broadcast(_joined({"reasons": reasons}, left), peers)
    head, left = _divided(round.receive(deadline_s, phase))
    return _verdict(head["reasons"]), left, None if where is None else round.own_reply()


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
        "memory_bytes": [float(one.memory) for one in outcomes],
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


def _completed(result: RestoreResult, skipped: Sequence[Skipped], noted: Mapping[str, Json]) -> RestoreResult:
    """Returns the result with what the coordinator alone has looked for."""
    metrics = dict(result.manifest.metrics) | {name: untag_number(value) for name, value in noted.items()}
    return replace(result, skipped=tuple(skipped), metrics=metrics)


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
        self._reads = 0
        self.local: Callable[[CheckpointId], LocalState | None] = lambda id: None
        """Returns what this rank has of a checkpoint in memory; it is closed here."""
        self.raised_by_all = False
        """Whether the last restore has ended by a vote that all ranks have received: no rank waits for more of it."""

    def restore(
        self, step: int | str | CheckpointId, *, withdrawn: Container[int] = frozenset()
    ) -> RestoreResult | None:
        """Restores what the coordinator chooses; None, on all ranks, where the run has no checkpoint. `withdrawn`: the
        coordinator's, as `walk` has it."""
        self.raised_by_all = False
        return self._choose(step, withdrawn) if self.group.coordinates else self._follow()

    def resume(self, resume_from: int | str | None, *, withdrawn: Container[int]) -> RestoreResult | None:
        """Restores at the start of training; None where that starts afresh."""
        crashpoint("repository opened, nothing chosen yet")
        return None if resume_from is None else self.restore(resume_from, withdrawn=withdrawn)

    # -- the coordinator -----------------------------------------------------------------------------------------------

    def _choose(self, resume_from: int | str | CheckpointId, withdrawn: Container[int]) -> RestoreResult | None:
        """Opens one round for each candidate, and one more where nothing is left to try."""
        try:
            if resume_from == "latest":
                result, _, newest = choose(self._repo, self._run, self._restored, self._emitter, withdrawn=withdrawn)
                result = result and replace(result, newest=newest)
            else:
                result = exactly(self._repo, resolve(self._repo, self._run, resume_from), self._restored)
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

    def _restored(self, id: CheckpointId, skipped: Sequence[Skipped] = ()) -> RestoreResult:
        """Opens a round for a checkpoint, and restores it with the others."""
        data = self._repo.manifest_bytes(id)
        mark = hashlib.sha256(data).hexdigest()
        copy = data if len(data) <= BROADCAST_BYTES else b""
        skipped = [(one, _shown(reason)) for one, reason in skipped]
        passed = [[_id_json(one), reason] for one, reason in skipped]
        noted = {name: tag_number(value) for name, value in noted_metrics(self._repo, id).items()}
        with self._open_round() as round:
            round.broadcast(b"\n".join([TRY, canonical_json.dumps([_id_json(id), mark, passed, noted]), copy]))
        return _completed(self._read(id, lambda: data), skipped, noted)

    # -- the others ----------------------------------------------------------------------------------------------------

    def _follow(self) -> RestoreResult | None:
        reported: set[CheckpointId] = set()
        damaged: list[Skipped] = []
        """What was tried last, unless it is tried again."""

        def report(skipped: Sequence[Skipped]) -> None:
            for one, reason in skipped:
                if one not in reported:
                    reported.add(one)
                    self._emitter.emit(CandidateSkipped(one, reason))

        while True:
            try:
                with self._open_round() as round:
                    message = round.receive(self._deadline_s, "the choice of a checkpoint")
            except BaseException:
                report(damaged)
                raise
            if message == NONE:
                return None
            _, name, data = message.split(b"\n", 2)
            candidate, mark, passed, noted = canonical_json.loads(name)
            id = CheckpointId(*candidate)
            skipped = [(CheckpointId(*one), str(reason)) for one, reason in passed]
            report([*skipped, *(one for one in damaged if one[0] != id)])
            try:
                return _completed(self._read(id, partial(self._found, id, mark, data)), skipped, noted)
            except CorruptionError as error:
                damaged = [(id, error.message)]

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

    def _read(self, id: CheckpointId, data: Callable[[], bytes]) -> RestoreResult:
        """Reads this rank's part once the checkpoint fits all ranks, votes, and sets plain values once
        all have voted for it. Raises CorruptionError where some rank found it damaged, or gone; StateMismatch on all
        ranks where none takes some of it; any other error of this rank, or RankFailed for one of another."""
        began = time.perf_counter()
        outcome = RankOutcome()
        manifest, matched = self._matched(id, data, outcome)
        with ExitStack() as stack:
            if self.group.spread:
                self._hand_over(id, manifest, matched, stack)
            node = self._shared_reads()
            if node is not None:
                stack.callback(node.close)
            ranks = self._read_and_vote(id, matched, outcome, node)
        crashpoint("restore voted for, run not yet claimed")
        try:
            state = matched.prepared.apply()
        except BaseException as error:
            self.raised_by_all = True  # by the next round of the others, which is the end of a load, or the claim
            self.group.break_off(error)
            raise
        seconds = time.perf_counter() - began
        self._emitter.emit(RestoredEvent(id, outcome.nbytes, seconds, manifest.content, ranks))
        return RestoreResult(id, manifest, state, matched.prepared.report, outcome.nbytes, seconds, ranks=ranks)

    def _shared_reads(self) -> NodeSharedReads | None:
        """Returns the shared reads of this node's ranks for one more checkpoint."""
        self._reads += 1
        if self._peers is None:
            return None
        # A rank of the node that has read nothing for as long as a stopped one is waited for is not waited for either.
        patience_s = min(self.group.agreement.session.settings.dead_after_s, self.group.timeout_s / 4)
        return self._peers.reads(self._reads, patience_s=patience_s, emitter=self._emitter)

    def _read_and_vote(
        self, id: CheckpointId, matched: Matched, outcome: RankOutcome, node: NodeSharedReads | None
    ) -> RankTimings | None:
        """Reads this rank's part. Returns, once all ranks have, where the time went on each."""
        own: BaseException | None = None
        local: LocalState | None = None
        began = time.perf_counter()
        try:
            local = self.local(id)
            outcome.nbytes = matched.read(node, local)
            outcome.memory = 0 if local is None else local.taken
            outcome.wait_s = 0.0 if node is None else node.waited_s
            outcome.read_s = max(time.perf_counter() - began - outcome.wait_s, 0.0)
        except Exception as error:  # noqa: BLE001 - sent to all, and raised here after the vote
            own = as_damage(error)
            outcome.reason = _reason(own)
            if node is not None:
                node.leave()
        finally:
            if local is not None:
                local.close()
        crashpoint("part restored, not yet voted for")
        with self._open_round() as round:
            self.raised_by_all = True
            verdict, ranks = agreed(round, outcome, self._deadline_s, f"the restore of {id}")
        self._check(verdict, own, id)
        self.raised_by_all = False
        return ranks

    def _hand_over(self, id: CheckpointId, manifest: Manifest, matched: Matched, stack: ExitStack) -> None:
        """Puts into the home what some rank needs and only this rank's node has, until `stack` is closed."""
        places, own = places_of(self._repo.store), None
        assert places is not None, "the ranks agreed on it"
        handed = HandOver(self._repo, places, self.group, self._deadline_s)
        if not handed.agree(matched.needs):
            return
        stack.callback(handed.end)
        try:
            handed.put(manifest)
        except Exception as error:  # noqa: BLE001 - sent to all, and raised here after the vote
            own = as_damage(error)
        with self._open_round() as round:
            self.raised_by_all = True
            reason = "" if own is None else _reason(own)
            verdict = round.vote(own is None, reason, self._deadline_s, f"sharing data files of {id}")
        self._check(verdict, own, id)
        self.raised_by_all = False
        handed.await_visible(id)

    def _matched(self, id: CheckpointId, data: Callable[[], bytes], outcome: RankOutcome) -> tuple[Manifest, Matched]:
        """Matches the checkpoint on every rank with what it holds. Where it does not fit some rank, or all leave some
        of it over, nothing of any target has changed."""
        began = time.perf_counter()
        found: tuple[Manifest, Matched] | None = None
        own: BaseException | None = None
        rank, of = self.group.rank, self.group.world_size
        try:
            manifest = _manifest(data(), id, self._repo)
            found = manifest, match(self._repo, manifest, self._prepare, rank=rank, of=of, emitter=self._emitter)
            outcome.match_s = time.perf_counter() - began
        except Exception as error:  # noqa: BLE001 - sent to all, and raised here after the vote
            own = as_damage(error)
        left_over = None if found is None else found[1].prepared.unmatched
        reason = "" if own is None else _reason(own)
        with self._open_round() as round:
            self.raised_by_all = True
            where = None if self._peers_known else here()
            verdict, left, peers = fits(
                round, reason, left_over, where, deadline_s=self._deadline_s, phase=f"the match of {id}"
            )
            if peers is not None:
                self._peers_known, self._peers = True, NodePeers.decode(self.group.agreement, peers)
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


def _id_json(id: CheckpointId) -> Json:
    return [id.run, id.attempt, id.step]


def _reason(error: BaseException) -> str:
    return (DAMAGED if isinstance(error, _PASSED_OVER) else "") + in_words(error)


def _manifest(data: bytes, id: CheckpointId, source: Repo) -> Manifest:
    found = decode_manifest(data, id, source.id)
    assert not isinstance(found, Aborted), "chosen"
    source.authenticate(found, data)
    return found
