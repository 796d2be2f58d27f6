"""Restoring as one of several ranks: the coordinator chooses, all match it with what they hold, read, and vote."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Container
from functools import partial
from typing import Final

from holdfast.api.company import RESTORE_TIMES, Company
from holdfast.api.outcome import Outcome, agreed, fits, refuse_what_none_takes
from holdfast.crashpoints import crashpoint
from holdfast.engine.joint.handing import dealt, hand_on, is_there, lacking
from holdfast.engine.joint.neighbours import Neighbours
from holdfast.engine.joint.together import NodeReads
from holdfast.engine.joint.visible import awaited
from holdfast.engine.joint.window import Timing
from holdfast.engine.restore import Matched, Prepare, RestoreResult, as_damage, choose, chosen, exactly, match
from holdfast.errors import CheckpointNotFound, CorruptionError, RankFailed, RanksMissing, in_words
from holdfast.events import CandidateSkipped, Emitter, RestoredEvent
from holdfast.model import canonical
from holdfast.model.checkpoint import Manifest
from holdfast.model.names import CheckpointId
from holdfast.ranks.contract import Verdict
from holdfast.ranks.topic import Topic
from holdfast.repo.manifest import Aborted, decode_manifest
from holdfast.repo.places import Places
from holdfast.repo.repository import Repo

TRY, NONE = b"try", b"none"
DAMAGED: Final = "damaged: "
_PASSED_OVER: Final = (CorruptionError, CheckpointNotFound)
TOLD_BYTES: Final = 64 << 10
"""A longer manifest is not told: each rank reads it. That of thousands of ranks, told to each of them, does not fit
through the one place where they meet."""
PATIENCE_S: Final = 30.0
"""A neighbour that has read nothing for so long is not waited for: each rank reads for itself then."""


class ReadingTogether:
    """The ranks of one job, restoring one run. Each of them calls the same methods in the same order."""

    def __init__(self, repo: Repo, run: str, prepare: Prepare, *, company: Company, emitter: Emitter) -> None:
        self.company = company
        self._repo = repo
        self._run = run
        self._prepare = prepare
        self._emitter = emitter
        self._deadline_s = RESTORE_TIMES * company.timeout_s
        self._met = False
        self._neighbours: Neighbours | None = None
        self._round = 0
        self.raised_by_all = False
        """Whether the last restore has ended by a vote that all have heard: nobody waits for more of it."""

    def restore(self, resume_from: int | str, *, withdrawn: Container[int] = frozenset()) -> RestoreResult | None:
        """What the coordinator chooses; None, on all ranks, where the run has no checkpoint. `withdrawn`: the
        coordinator's, as `walk` has it."""
        self.raised_by_all = False
        return self._choose(resume_from, withdrawn) if self.company.coordinates else self._follow()

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
                with self._topic() as topic:
                    topic.fail(in_words(error))
            raise
        if result is None:
            with self._topic() as topic:
                topic.announce(NONE)
        return result

    def _tried(self, id: CheckpointId) -> RestoreResult:
        data = self._repo.manifest_bytes(id)
        mark = hashlib.sha256(data).hexdigest()
        told = data if len(data) <= TOLD_BYTES else b""
        with self._topic() as topic:
            topic.announce(b"\n".join([TRY, canonical.dumps([id.run, id.attempt, id.step, mark]), told]))
        return self._read(id, lambda: data)

    # -- the others ----------------------------------------------------------------------------------------------------

    def _follow(self) -> RestoreResult | None:
        while True:
            with self._topic() as topic:
                heard = topic.hear(self._deadline_s, "the choice of a checkpoint")
            if heard == NONE:
                return None
            _, name, data = heard.split(b"\n", 2)
            run, attempt, step, mark = canonical.loads(name)
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

    def _topic(self) -> Topic:
        return self.company.agreement.topic("restore")

    def _read(self, id: CheckpointId, manifest: Callable[[], bytes]) -> RestoreResult:
        """Reads this rank's part once the checkpoint fits all ranks, votes, and sets what is plain once all have voted
        for it. CorruptionError where some rank found it damaged, or gone; StateMismatch on all where none takes some of
        it; what else went wrong on this rank, or RankFailed where it did on another."""
        node = self._beside()
        try:
            return self._read_beside(id, manifest, node)
        finally:
            if node is not None:
                node.close()

    def _beside(self) -> NodeReads | None:
        """The ranks of this node, for one more checkpoint that all read."""
        if not self._met:
            self._met = True
            self._neighbours = Neighbours.meet(self.company.agreement, self._deadline_s)
        self._round += 1
        if self._neighbours is None:
            return None
        patience_s = min(PATIENCE_S, self.company.timeout_s / 4)
        return self._neighbours.reads(self._round, timing=Timing(patience_s), emitter=self._emitter)

    def _read_beside(self, id: CheckpointId, told: Callable[[], bytes], node: NodeReads | None) -> RestoreResult:
        began = time.perf_counter()
        outcome = Outcome()
        manifest, matched = self._matched(id, told, outcome)
        if self.company.spread:
            self._hand_on(id, manifest, matched)
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
        with self._topic() as topic:
            self.raised_by_all = True
            verdict, ranks = agreed(topic, outcome, self._deadline_s, f"the restore of {id}")
        self._check(verdict, own, id)
        self.raised_by_all = False
        crashpoint("restore voted for, run not yet claimed")
        state = matched.prepared.apply()
        seconds = time.perf_counter() - began
        self._emitter.emit(RestoredEvent(id, outcome.nbytes, seconds, manifest.content, ranks))
        return RestoreResult(id, manifest, state, matched.prepared.report, outcome.nbytes, seconds, ranks=ranks)

    def _hand_on(self, id: CheckpointId, manifest: Manifest, matched: Matched) -> None:
        """What a rank needs that only another one's node has is put into the home by that one."""
        places, own = self._repo.store, None
        assert isinstance(places, Places), "of all ranks alike"
        names = lacking(self._topic(), places, matched.needs, self._deadline_s)
        if not names:
            return
        ours = dealt(self._topic(), places, names, self.company.rank, self._deadline_s)
        try:
            hand_on(self._repo, manifest, ours)
        except Exception as error:  # noqa: BLE001 - told to all, and raised here after the vote
            own = as_damage(error)
        with self._topic() as topic:
            self.raised_by_all = True
            reason = "" if own is None else _reason(own)
            verdict = topic.vote(own is None, reason, self._deadline_s, f"handing on packs of {id}")
        self._check(verdict, own, id)
        self.raised_by_all = False
        # A network file system remembers for a while that a name was absent: what stays so, the reading tells.
        awaited(
            lambda: is_there(places, id, names), self.company.timeout_s, self.company.agreement.session.settings.clock
        )

    def _matched(self, id: CheckpointId, told: Callable[[], bytes], outcome: Outcome) -> tuple[Manifest, Matched]:
        """The checkpoint, matched on every rank with what it holds: where it does not fit some rank, or all leave some
        of it over, nothing of any target has changed."""
        began = time.perf_counter()
        found: tuple[Manifest, Matched] | None = None
        own: BaseException | None = None
        rank, of = self.company.rank, self.company.world_size
        try:
            manifest = _manifest(told(), id)
            found = manifest, match(self._repo, manifest, self._prepare, rank=rank, of=of, emitter=self._emitter)
            outcome.match_s = time.perf_counter() - began
        except Exception as error:  # noqa: BLE001 - told to all, and raised here after they have heard it
            own = as_damage(error)
        left_over = None if found is None else found[1].prepared.left_over
        reason = "" if own is None else _reason(own)
        with self._topic() as topic:
            self.raised_by_all = True
            verdict, left = fits(topic, reason, left_over, self._deadline_s, f"the match of {id}")
        self._check(verdict, own, id)
        assert found is not None
        refuse_what_none_takes(left_over, left)
        self.raised_by_all = False
        return found

    def _check(self, verdict: Verdict, own: BaseException | None, id: CheckpointId) -> None:
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
