"""Restores a run, and claims it for this process or for the job that it is a rank of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tenuto.crashpoints import crashpoint
from tenuto.engine.group.group import JobGroup
from tenuto.engine.memory_tier.eligibility import Candidate
from tenuto.engine.memory_tier.image_store import Image
from tenuto.engine.memory_tier.listing import sealed_of
from tenuto.engine.memory_tier.memory_restore import MemoryRestore
from tenuto.engine.memory_tier.tier import MemoryTier
from tenuto.engine.read.choose import (
    CheckpointLeaves,
    Restored,
    RestoreResult,
    Skipped,
    report_skipped,
    report_unhealthy,
)
from tenuto.engine.read.opened import Opened, open_checkpoint, open_image
from tenuto.engine.read.peek import peeking
from tenuto.engine.read.sharded_reader import PrivateEntry
from tenuto.engine.save.rank_group import RESTORE_TIMES, GroupRound, RankGroup
from tenuto.errors import CorruptionError, RunInUse, TenutoError, UsageError, in_words
from tenuto.events import AttemptClaimed, Emitter, Event, RestoredEvent, Resumed, Warned
from tenuto.model import exactness
from tenuto.model.ids import CheckpointId, run_key
from tenuto.model.records import Manifest
from tenuto.repo.format.small_records import encode_attempt
from tenuto.repo.lineage import latest
from tenuto.repo.ownership.claim import Attempt, announced, claim, claim_newest
from tenuto.repo.ownership.owner_watch import OwnerWatch
from tenuto.repo.replicated.places import places_read
from tenuto.repo.repository import Repo
from tenuto.state.contract import LateRead, Prepared
from tenuto.state.declarations import Late
from tenuto.state.position.training_position import Counters, TrainingPosition
from tenuto.state.restore.match import match_state
from tenuto.state.tree import KEYED, items, kind_of, walk
from tenuto.training import run_registry
from tenuto.training.arguments import Settings
from tenuto.training.emergency import EmergencyPlaces
from tenuto.training.fresh_start import left_behind, warn_of_fresh_start
from tenuto.training.snapshot import amended
from tenuto.training.tier_worker import TierWorker

WRITING_S = 10.0
"""How long a Checkpointer waits for a save that an earlier one of this process was interrupted at."""
_SHOWN = 3
_DRIVES_ALONE = ".ReduceLROnPlateau"
"""The scheduler that changes learning rates and notes nothing of where they began."""
AGAIN, CLAIMED = b"again", b"claimed"
"""The coordinator's broadcasts while it claims: all restore anew, or the run is claimed."""


@dataclass(slots=True)
class Peeked:
    """What `peek` has found, and `restore` takes. id: None for nothing. image: the one in memory that it lies in."""

    id: CheckpointId | None = None
    newest: CheckpointId | None = None
    skipped: tuple[Skipped, ...] = ()
    opened: Opened | None = None
    image: Image | None = None


class RunClaim:
    """Restores one run into one state, and claims it. Every rank of a group calls the same methods in the same order:
    the coordinator chooses the checkpoint and claims for all."""

    def __init__(
        self,
        repo: Repo,
        settings: Settings,
        state: Mapping[str, Any],
        position: TrainingPosition,
        *,
        emitter: Emitter,
        group: RankGroup,
        memory: MemoryTier | None = None,
    ) -> None:
        self._repo = repo
        self._run = run = settings.run
        self._state = state
        self._position = position
        self._resume_from = settings.resume_from
        self._takeover = settings.takeover
        self._keep = settings.keep
        self._wait_s = settings.wait_for_owner_s
        self._emitter = emitter
        self._group = group
        self._restorer = group.restorer(repo, run, self._prepare, emitter)
        self._looker = group.restorer(repo, run, self._prepare_peek, _without_restored(emitter))
        self._memory = memory
        self._filler = group.restorer(repo, run, self._prepare_late, _without_restored(emitter))
        self._peeked: Peeked | None = None
        self._late: list[str] = []
        """Entries that the restored checkpoint has, and the state did not have at the restore."""
        self._filled: dict[str, Any] = {}
        self._private: dict[str, Any] = {}
        self._counters = Counters()
        self.memory_restore = (
            MemoryRestore(repo, memory, run, group, emitter)
            if memory is not None and settings.resume_from == "latest"
            else None
        )
        """The restore from what an earlier process left in memory."""
        if memory is not None and self.memory_restore is not None:
            self._restorer.local = memory.local_state
        self._gathered = False
        """Whether what lay in memory is the newest checkpoint now."""
        self.restored: Restored | None = None
        self._watch: OwnerWatch | None = None
        """Begun before the restore, so that a lease that no longer changes runs out meanwhile."""
        self._newest: CheckpointId | None = None
        self._withdrawn: set[int] = set()
        """Attempts that were claimed here and given back unused: their parent is no longer the newest checkpoint."""
        self.done = False
        self._strict = True
        self.on_restored: Callable[[], None] | None = None
        """Called when restoring is done, also where there was nothing to restore."""
        self.tiers: TierWorker | None = None
        self.emergency: EmergencyPlaces | None = None
        self.on_claimed: Callable[[Restored | None], None] | None = None
        """Called with what was restored, once the run is claimed."""
        self._outcome: list[Event] = []
        """What `report` says of the last restore."""

    @property
    def parent(self) -> CheckpointId | None:
        """The newest durable checkpoint of the line of training."""
        if self.restored_image is not None:
            return self.restored_image.verdict.base
        return self.restored.checkpoint.id if self.restored is not None else None

    @property
    def restored_image(self) -> Candidate | None:
        """The image in memory that training resumes from."""
        return self.memory_restore.restored if self.memory_restore is not None else None

    @property
    def only_in_memory(self) -> bool:
        """Whether the step that training resumes from is in no checkpoint."""
        return self.restored_image is not None and not self.restored_image.verdict.durable

    def restore(self, *, strict: bool | None = None) -> Restored | None:
        """Restores what `resume_from` says, once; returns None if there is nothing to restore. `strict=False` restores
        what fits, also where another checkpoint has to be restored before the run is claimed. Once done, fills the
        entries that were late at the restore."""
        if self.done:
            self._fill_late()
        else:
            self._strict = self._strict if strict is None else strict
            self._begin()
            result, skipped = self._chosen() if self._peeked is None else self._restore_peeked(self._peeked)
            self.restored = None
            self._outcome = []
            if result is not None:
                result = replace(result, skipped=skipped + result.skipped)
                self._begin_at(result)
                skipped = result.skipped
            elif self._resume_from is not None and self._group.coordinates:
                warn_of_fresh_start(self._repo.url, self._run, self._emitter)
            if self._group.coordinates:
                taken, newest = None if result is None else result.id, self._newest
                if self._resume_from != "latest" and newest not in (None, taken) and newest.run == run_key(self._run):
                    self._outcome.append(left_behind(self._repo.url, newest, taken, keep=self._keep))
                report_skipped(self._emitter, self._repo.url, skipped, taken)
                if result is not None:
                    report_unhealthy(self._emitter, self._repo, result.manifest)
            if result is not None:
                self._outcome.append(self._resumed(result))
                if self._group.coordinates and (replaced := _replaced(result)):
                    self._outcome.append(Warned(replaced, self._run))
            self.done = True
            if self.on_restored is not None:
                self.on_restored()
        return self.restored

    def _begin(self) -> None:
        self._close_own()  # before the state, which may be its own, and the random generators are restored
        if self.tiers is not None and self._group.coordinates:
            self.tiers.catch_up(self._resume_from)
        if self.emergency is not None and self._resume_from == "latest":
            self.emergency.take_over(
                self._memory, takeover=self._takeover, wait_s=self._wait_s, waiting=self._emitter.emit
            )
        self._gathered = self._gather()
        self._watch = self._watch or OwnerWatch(self._repo, self._run)

    def _gather(self) -> bool:
        """Saves the newest state in memory that only together the ranks can resume from, so that all restore it from
        the store; returns whether there was one."""
        memory, group = self._memory, self._group
        if memory is None or self.memory_restore is None or group.spread:
            return False
        if not isinstance(group, JobGroup) and all(seal.ranks == 1 for _, seal in sealed_of(self._repo.id, self._run)):
            return False
        from tenuto.maintenance.gather import gather  # seldom needed by one process

        options = {
            "takeover": self._takeover,
            "wait_s": self._wait_s,
            "waiting": self._emitter.emit,
            "withdrawn": self._withdrawn,
        }
        return gather(self._repo, self._run, memory, group, report=self._warn, **options) is not None

    def _chosen(self) -> tuple[RestoreResult | None, tuple[Skipped, ...]]:
        memory = None if self._gathered else self.memory_restore
        # The walk that chooses says what is the newest: listing the steps twice costs as many requests again.
        chosen = memory is None and self._resume_from == "latest"
        self._newest = None if chosen else latest(self._repo, self._run, withdrawn=self._withdrawn)
        result = memory.restore(self._prepare) if memory is not None else None
        result = result or self._restorer.resume(self._resume_from, withdrawn=self._withdrawn)
        if chosen and result is not None:
            self._newest = result.newest
        return result, tuple(memory.skipped) if memory is not None else ()

    # -- in two halves -------------------------------------------------------------------------------------------------

    def peek(self) -> Opened | None:
        """Returns the checkpoint that `restore` will restore, every byte of it verified; None where there is none."""
        if self.done:
            raise UsageError(
                "peek() looks at what restore() is going to take, and it is restored already",
                subject=self._run,
                hint="call ckpt.peek() first; ckpt.restore() returns what was restored",
            )
        if self._peeked is None:
            self._begin()
            self._peeked = self._peek()
        return self._peeked.opened

    def _peek(self) -> Peeked:
        memory, ranks = None if self._gathered else self.memory_restore, self._group.world_size
        newest = latest(self._repo, self._run, withdrawn=self._withdrawn)
        passed: tuple[Skipped, ...] = ()
        if memory is not None:
            found = memory.peek(partial(self._prepare_peek, verify=False))
            passed = tuple(memory.skipped)
            if found is not None:
                candidate, result = found
                image = memory.open(candidate)
                opened = open_image(image.repo, result.id, candidate.footer.rank, of=candidate.footer.ranks)
                return Peeked(result.id, newest, passed, opened, image)
        durable = self._looker.resume(self._resume_from, withdrawn=self._withdrawn)
        if durable is None:
            return Peeked(None, newest, passed)
        own = self._group.rank if len(durable.manifest.indexes) == ranks else None
        opened = open_checkpoint(self._repo, durable.id, rank=own, emitter=self._emitter)
        opened.skipped = passed + durable.skipped
        return Peeked(durable.id, newest, opened.skipped, opened)

    def _restore_peeked(self, peeked: Peeked) -> tuple[RestoreResult | None, tuple[Skipped, ...]]:
        self._newest = peeked.newest
        result = None
        if peeked.image is not None:
            assert self.memory_restore is not None
            result = self.memory_restore.restore(self._prepare)
            if result is None or result.id != peeked.id:
                raise CorruptionError(
                    f"{peeked.id} in memory was whole when peek() read it, and cannot be restored now",
                    subject=str(peeked.id),
                    hint="start again: what cannot be read is passed over then",
                )
        elif peeked.id is not None:
            result = self._restorer.restore(peeked.id)
        return result, peeked.skipped

    def _fill_late(self) -> None:
        """Fills the entries that have been put into the state since the restore."""
        made = [name for name in self._late if type(self._state.get(name)) is not Late]
        if not made:
            return
        assert self.restored is not None
        self._filled = {name: self._state[name] for name in made if name in self._state}
        if self.restored_image is not None:
            assert self.memory_restore is not None
            result = self.memory_restore.restore(self._prepare_late)
        else:
            result = self._filler.restore(self.restored.checkpoint.id)
        if result is None or result.id != self.restored.checkpoint.id:
            raise CorruptionError(
                f"{self.restored.checkpoint.id} was restored, and its {made[0]!r} cannot be read now",
                subject=made[0],
                hint="start again: what cannot be read is passed over then",
            )
        for name, value in self._filled.items():
            if self._state[name] is not value:
                assert isinstance(self._state, MutableMapping)
                self._state[name] = value
        self._late = [name for name in self._late if name not in made]
        report, more = self.restored.report, result.report
        self.restored = replace(
            self.restored,
            report=replace(
                report,
                restored=report.restored + more.restored,
                created=report.created + more.created,
                missing=report.missing + more.missing,
                unexpected=report.unexpected + more.unexpected,
                mismatched=report.mismatched + more.mismatched,
                notes=report.notes + more.notes,
            ),
        )
        self._position.restore_random_state()  # what made the objects may have drawn

    def _refuse_late(self) -> None:
        for name in self._late:
            still = type(self._state.get(name)) is Late
            how = "is still late" if still else "was late at the restore, and what took its place is not restored"
            raise UsageError(
                f"the entry {name!r} of the state {how}: the checkpoint that training resumes from has it, and "
                "counting or saving now would lose it",
                subject=name,
                hint=f"{f'state[{name!r}] = …, then ' if still else ''}ckpt.restore() once more, before the first step",
            )

    def report(self) -> None:
        """Says once where the run resumes from and what it leaves behind. A loop says it after the claim: a run that
        another process owns does not resume here."""
        outcome, self._outcome = self._outcome, []
        for event in outcome:
            self._emitter.emit(event)

    def _begin_at(self, result: RestoreResult) -> None:
        moved = self._position.moved(self._counters)
        self._position.load(self._private, self._counters, moved)
        restored = Restored.of(
            result, self._repo.url, self.restored_image.footer.age_s if self.restored_image else None
        )
        certificate = self._position.amended(restored.certificate, moved)
        data = self._position.data
        reasons = (*self._position.reasons, *(data.reasons if data is not None else ()))
        self.restored = replace(restored, certificate=amended(certificate, self._state, restored.report, reasons))
        for reason in self._position.reasons:
            self._warn(reason)

    def exists(self) -> bool:
        """Returns whether the run has a checkpoint, durable or in memory."""
        return latest(self._repo, self._run) is not None or (
            self.memory_restore is not None and self.memory_restore.exists()
        )

    def hidden_by_saving(self) -> bool:
        """Returns whether a fresh start here would hide checkpoints, which was not requested."""
        return self._resume_from is not None and self.exists()

    def claim(self) -> Attempt:
        """Claims the run for this process and the other ranks, from what was restored. If `latest` means another
        checkpoint by then, restores that and claims the run anew. Raises UsageError for late entries that the
        checkpoint has."""
        self._refuse_late()
        if self._peeked is not None and self._peeked.image is not None:
            assert self._peeked.opened is not None
            self._peeked.opened.close()  # its slot will be written to
            self._peeked.image.close()
        attempt = self._claim_for_all() if self._group.coordinates else self._await_claim()
        try:
            self._group.check_claim_visible(attempt)
            if self.on_claimed is not None:
                self.on_claimed(self.restored)
        except BaseException:
            attempt.release()
            raise
        return attempt

    def _claim_for_all(self) -> Attempt:
        try:
            attempt = self._claim()
        except BaseException as error:
            if not self._restorer.raised_by_all:
                with self._claims() as round:
                    round.fail(in_words(error))
            raise
        try:
            with self._claims() as round:
                round.broadcast(CLAIMED + b"\n" + encode_attempt(attempt.record, self._repo.id))
        except BaseException:
            attempt.release()
            raise
        return attempt

    def _await_claim(self) -> Attempt:
        self._close_own()
        while True:
            with self._claims() as round:
                deadline_s = RESTORE_TIMES * self._group.timeout_s
                kind, _, record = round.receive(deadline_s, "the claim of the run").partition(b"\n")
            if kind == CLAIMED:
                crashpoint("claim heard, nothing saved yet")
                attempt = announced(self._repo, record)
                self._emitter.emit(AttemptClaimed(self._run, attempt.number, attempt.parent))
                return attempt
            self.done = False
            self.restore()

    def _claims(self) -> GroupRound:
        return self._group.round("claim")

    def _claim(self) -> Attempt:
        self._close_own()
        options: Any = {
            "takeover": self._takeover,
            "observe": self._watch,
            "wait_s": self._wait_s,
            "waiting": self._emitter.emit,
            "trouble": self._report_trouble,
            "report": self._warn,
            "withdrawn": self._withdrawn,
        }
        if self._resume_from == "latest":
            again, stale = self._restore_anew, self._appeared
            attempt = claim_newest(
                self._repo, self._run, self._newest, self.parent, again=again, stale=stale, **options
            )
        else:
            attempt = claim(self._repo, self._run, self.parent, **options)
        if self.tiers is not None:
            try:
                self.tiers.announce(attempt)
            except BaseException:
                attempt.release()
                raise
        self._emitter.emit(AttemptClaimed(self._run, attempt.number, attempt.parent))
        return attempt

    def _appeared(self) -> bool:
        """Returns whether an owner that was alive at the restore has died since and left a newer state in memory."""
        return self.done and self.memory_restore is not None and self.memory_restore.appeared()

    def _close_own(self) -> None:
        """Closes an earlier Checkpointer of this process, as when a notebook's cell is run twice; waits for a save that
        one has left in flight, which the claim would cut off."""
        key = (self._repo.id, run_key(self._run))
        run_registry.await_writing(key, WRITING_S)
        earlier = run_registry.live(key)
        if earlier is not None:
            if self._group.coordinates:  # the other ranks do the same
                self._warn(
                    f"closing the Checkpointer that this process has on run {self._run}: this one takes its place"
                )
            earlier.close_replaced()

    def _restore_anew(self) -> tuple[CheckpointId | None, CheckpointId | None]:
        if self._peeked is not None:
            raise RunInUse(
                f"another process committed {latest(self._repo, self._run)} after peek() had read "
                f"{self._peeked.id or 'that there is nothing'}",
                subject=self._run,
                hint="start again, which resumes from there",
            )
        with self._claims() as round:
            round.broadcast(AGAIN)
        self.done = False
        self.restore()
        return self._newest, self.parent

    def _resumed(self, result: RestoreResult) -> Resumed:
        image = self.restored_image
        read = places_read(self._repo.store, result.id.directory)
        in_memory = None if result.ranks is None else result.ranks.parts.get("memory_bytes")
        if in_memory is not None:
            each = in_memory.each
            some = f"{sum(map(bool, each))} of {len(each)}" if each else "some"
            read = [f"the memory of {some} ranks", *(read or [self._repo.url])]
        where, age_s = " and ".join(read) or self._repo.url, None if image is None else image.footer.age_s
        base = None if image is None else image.verdict.base
        verdict, run = self._verdict(), run_key(self._run)
        return Resumed(result.id, where, result.bytes, result.seconds, age_s, base, verdict, run)

    def _verdict(self) -> str:
        """Returns whether the resume is exact, and a reason if it is not."""
        assert self.restored is not None
        return exactness.in_words(self.restored.certificate)

    def _warn(self, message: str) -> None:
        self._emitter.emit(Warned(message, self._run))

    def _report_trouble(self, error: TenutoError) -> None:
        self._warn(f"the lease of run {self._run!r} could not be renewed: {error.message}")

    def _prepare(self, manifest: Manifest, leaves: CheckpointLeaves) -> Prepared:
        self._counters = Counters.of(manifest)  # before anything is touched: an unreadable manifest is skipped
        # Empty mappings accept whatever the checkpoint has: positions and random states know their own form.
        self._private = {"data": {}, "random": {}}
        self._late = [name for name in self._entries_of(manifest) if type(self._state.get(name)) is Late]
        prepared = match_state(
            manifest.tree,
            leaves.private,
            leaves.specs,
            self._state,
            private_into=self._private,
            strict=self._strict,
            apart=self._group.world_size > 1,
        )
        moved = self._position.moved(self._counters)
        if moved is not None:
            random = PrivateEntry(self._repo, manifest, moved.donor, "random", self._emitter)
            prepared.other_rank = LateRead(random.needs, partial(self._take_random, random))
        return prepared

    def _prepare_late(self, manifest: Manifest, leaves: CheckpointLeaves) -> Prepared:
        return match_state(
            manifest.tree,
            leaves.private,
            leaves.specs,
            self._filled,
            within=self._state,
            strict=self._strict,
            apart=self._group.world_size > 1,
        )

    def _prepare_peek(self, manifest: Manifest, leaves: CheckpointLeaves, verify: bool = True) -> Prepared:
        Counters.of(manifest)
        group = self._group
        # Each node has its own data files there, of which a rank reads what it holds: that is not known yet.
        verify = verify and not group.spread
        return peeking(self._repo, manifest, leaves, rank=group.rank, of=group.world_size, verify=verify)

    @staticmethod
    def _entries_of(manifest: Manifest) -> list[str]:
        tree = manifest.tree
        return [key for key, _ in items(tree) if type(key) is str] if kind_of(tree) in KEYED else []

    def _take_random(self, entry: PrivateEntry) -> None:
        self._private["random"] = entry.read()


def _replaced(result: RestoreResult) -> str:
    """Describes what the checkpoint has put in the place of what the script gives to its optimizers; empty for
    nothing."""
    found = list(dict.fromkeys(result.report.replaced))
    if any(str(node.get("type")).endswith(_DRIVES_ALONE) for _, node in walk(result.manifest.tree) if _is_object(node)):
        found = [one for one in found if not one.startswith("lr ")]
    if not found:
        return ""
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return (
        f"the checkpoint's {', '.join(found[:_SHOWN])}{more} of this script's optimizer: to train on with yours, set "
        "it in optimizer.param_groups behind the restore, before the first step"
    )


def _is_object(node: Any) -> bool:
    return isinstance(node, dict) and kind_of(node) == "object"


def _without_restored(emitter: Emitter) -> Emitter:
    """Returns an emitter of everything but that a checkpoint was restored: the restore itself says so, once."""
    return Emitter((lambda event: None if isinstance(event, RestoredEvent) else emitter.emit(event),))
