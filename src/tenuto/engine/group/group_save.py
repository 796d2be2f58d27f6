"""A save that the ranks of a job take together.

Each rank sends that it is ready; the coordinator checks that all mean the same save, puts `begin.json`, and broadcasts
that objects may be put. Each then sends what it has put, durably; the coordinator proves it, puts the table of parts
and the manifest, and broadcasts that the checkpoint exists. What goes wrong on one rank fails the save on all of them,
with that rank's number. Training waits for others only where a structure is new: then all ranks plan it together.

Nothing of the training job's own collectives is used, and every wait has a deadline (I8).
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from tenuto.concurrency.deadlines import begun_within
from tenuto.crashpoints import crashpoint
from tenuto.engine.group.planning import PLANNING, GroupPlan, GroupPlanner, WriteAssignment, first_of_each
from tenuto.engine.group.replica_check import ComparedRows, ReplicaDigests, check_replicas, check_sets
from tenuto.engine.group.rounds import (
    SHARE_ONE_PLACE,
    STEP,
    RankMessage,
    SaveRounds,
    WaitPoints,
    becomes_visible,
    phase,
    read_message,
    refusal,
    same,
    sees_begin,
    through,
)
from tenuto.engine.save.commit_protocol import ManifestCallback
from tenuto.engine.save.handle import Save
from tenuto.engine.save.job import Job, ManifestDetails, manifest_about, stored_in
from tenuto.errors import RanksDisagree, RanksError, SaveFailed, ShardMismatch, TenutoError, in_words
from tenuto.model import canonical_json
from tenuto.model.canonical_json import Spelled
from tenuto.model.health import Health, united
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Index, IndexEntry, Json, Manifest, Receipt
from tenuto.model.timing import RankTimings, Timing
from tenuto.ranks.agreement import Agreement
from tenuto.ranks.round import Round
from tenuto.repo.commit import begin, commit, put_object
from tenuto.repo.format.manifest import joint_digest, rank_digest
from tenuto.repo.format.object_names import BOXES
from tenuto.repo.format.objects import Fields, checkpoint_json
from tenuto.repo.format.shard_table import encode_boxes
from tenuto.repo.ownership.claim import Attempt
from tenuto.repo.repository import Repo
from tenuto.sharding.holdings import Column
from tenuto.sharding.merge_trees import unite
from tenuto.sharding.write_plan import Strategy
from tenuto.state.contract import Flattened
from tenuto.state.position.rng import alike

# --------------------------------------------------------------------------------------------------
# Where the chunks of a rank are stored, if they are encoded: sent with its receipts, and united in the manifest.


def _sent_of(index: Index) -> dict[str, Any]:
    """Returns what a rank sends of it."""
    stored = stored_in(index)
    return {**stored, "bases": [checkpoint_json(base) for base in stored["bases"]]} if stored else {}


def _bases(posts: Iterable[RankMessage]) -> tuple[CheckpointId, ...]:
    """Returns the checkpoints that any of the ranks names."""
    reader = Fields({}, "what a rank has sent")
    named = (base for post in posts for base in post.head.get("bases", ()))
    return tuple(sorted({reader.checkpoint_of(base, "a checkpoint") for base in named}))


def _united(posts: Sequence[RankMessage]) -> dict[str, Any]:
    """Returns what the manifest says."""
    stored = [int(post.head["stored"]) for post in posts if "stored" in post.head]
    rounded = any(post.head.get("rounded") for post in posts)
    return {"bases": _bases(posts), "rounded": rounded, "stored": sum(stored)} if stored else {}


def _united_health(posts: Sequence[RankMessage]) -> Health | None:
    """Returns the health of what all ranks have written; None where one has not looked."""
    parts = [(Health.read(post.head["health"]), int(post.head["bytes"])) for post in posts if "health" in post.head]
    return united(parts) if len(parts) == len(posts) else None


# --------------------------------------------------------------------------------------------------
# The timing of a save on each rank, sent with its receipts and merged by the coordinator.


def own_timing(save: Save) -> dict[str, Any]:
    """Returns this rank's timing, in its writing thread, when its part is durable."""
    save.clock.read_cpu()
    took = time.monotonic() - save.begun_s if save.begun_s is not None else 0.0
    return {**replace(save.timing, seconds=took).to_json(), "bytes": save.bytes}


def timings_of(records: Sequence[Mapping[str, Any]]) -> RankTimings:
    """Merges, on the coordinator, what each rank sent, by rank."""
    return RankTimings.of([Timing.read(one, int(one.get("bytes", 0))) or Timing() for one in records])


def spread_over(about: ManifestDetails, timings: RankTimings) -> ManifestDetails:
    """Returns `about`, whose timing is the coordinator's own, with the timings of all ranks beside it."""
    timing = dict(about.environment.get("timing") or {})
    return replace(about, environment={**about.environment, "timing": {**timing, "ranks": timings.to_json()}})


# --------------------------------------------------------------------------------------------------
# The progress of all ranks: in the data that they share, and in their random streams.

_WHAT: Final = "where they are in the data that they share"


def rank_progress(about: ManifestDetails) -> dict[str, Json]:
    """Returns what one rank sends before objects are put."""
    return {"data": about.progress.get("data"), "random": dict(about.marks)}


def shared_progress(posts: Sequence[RankMessage]) -> dict[str, Json]:
    """Merges the progress of all ranks for the manifest; a rank may have no data. Raises RanksDisagree where ranks that
    share an order of samples are not at the same place in it."""
    data = {rank: post.head["data"] for rank, post in enumerate(posts) if post.head["data"] is not None}
    spelled = {rank: canonical_json.dumps(one).decode() for rank, one in data.items()}
    if len(set(spelled.values())) > 1:
        differing = ", ".join(f"rank {rank}: {one}" for rank, one in list(spelled.items())[:8])
        raise RanksDisagree(
            f"the ranks do not agree about {_WHAT} ({differing})",
            subject=_WHAT,
            hint="the samplers of all ranks take one seed= and one dataset, and all ranks as many batches",
        )
    marks: list[Mapping[str, str]] = [post.head["random"] for post in posts]
    found: dict[str, Json] = {"data": next(iter(data.values()))} if data else {}
    return found | ({"alike": alike(marks)} if all(marks) else {})


SAVE_DEADLINE_S: Final = 600.0
"""How long the slowest rank may be behind the fastest. One that is dead or stopped is found much earlier."""
COMPARE_EVERY: Final = 50
"""Saves after which replicas that are declared to be equal are compared again."""
GO: Final = "go"
READY, PUT, ROWS = "ready", "put", "rows"


@dataclass(slots=True)
class _SaveInProgress:
    """One save under way.

    round: the round in which ranks send that they are ready; put: that they have put their parts.
    state: the tree of this moment, encoded in the writing thread.
    replicas: a digest of each compared row.
    all_replicas: whether rows that are declared to be equal are compared too.
    plan: on the coordinator. A later save may be planned anew while this one is still being written.
    boxes: on the coordinator, waits until the table of parts is put, beside its packs.
    """

    round: Round
    share: WriteAssignment
    state: Json
    compared: ComparedRows
    replicas: bytes
    all_replicas: bool
    plan: GroupPlan | None
    sends_tree: bool = True
    put: Round | None = None
    boxes: Callable[[], tuple[Receipt, IndexEntry]] | None = None
    tree: Spelled = field(init=False)
    digest: str = field(init=False)

    def spell(self) -> None:
        self.tree = canonical_json.spell(self.state)
        self.digest = hashlib.sha256(self.tree.text).hexdigest()


class GroupCommit:
    """The ranks of one job and run, saving together. Each of them calls the same methods for the same saves."""

    def __init__(
        self,
        repo: Repo,
        agreement: Agreement,
        *,
        strategy: Strategy = "balanced",
        deadline_s: float = SAVE_DEADLINE_S,
        nodes: Column | None = None,
    ) -> None:
        """`nodes`: as `assign` takes them; the coordinator's count."""
        self._repo = repo
        self._agreement = agreement
        self._deadline_s = deadline_s
        self._rounds = SaveRounds(deadline_s, self._forget)
        self._planning = GroupPlanner(agreement, self._rounds, strategy, repo.chunk_bytes, nodes)
        self._share: WriteAssignment | None = None
        self._saves: dict[str, _SaveInProgress] = {}
        self._replicas = ReplicaDigests()

    @property
    def rank(self) -> int:
        return self._agreement.rank

    @property
    def coordinates(self) -> bool:
        return self._agreement.is_coordinator

    @property
    def has_peers(self) -> bool:
        return self._agreement.world_size > 1

    # -- the training thread -------------------------------------------------------------------------------------------

    def take(self, flattened: Flattened, save: Save) -> Flattened:
        """Returns what this rank writes of the state. Raises RankFailed, RanksMissing, RanksDisagree, ShardMismatch."""
        return through(self.take_steps(flattened, save))

    def take_steps(self, flattened: Flattened, save: Save) -> WaitPoints[Flattened]:
        if save.step <= self._rounds.refused_through:
            raise self._skipped_step(save.step)
        agreement = self._agreement
        save.waits_for = lambda: agreement.session.waits_for
        round = agreement.round("save")
        save.save_id = hashlib.sha256(f"{agreement.session.id} {round.number}".encode()).hexdigest()[:32]
        share = self._share
        anew = share is None or share.own != flattened.fingerprint
        if share is None or anew:
            save.phase = PLANNING
            agreement.report(f"planning the save of step {save.step}")
            share = self._share = yield from self._planning.take(round, flattened, save)
            round = agreement.round("save")
        try:
            return self._take_share(share, round, flattened, save, anew=anew)
        except BaseException as error:
            self._fail_round(round, save.step, error)
            raise

    def missed(self, step: int, error: BaseException) -> None:
        """Fails the save of `step` on all ranks: this one met an error before it could take part."""
        if step > self._rounds.refused_through:
            self._fail_round(self._agreement.round("save"), step, error)

    def _fail_round(self, round: Round, step: int, error: BaseException) -> None:
        round.fail(in_words(error), phase=f"the save of step {step}")
        round.end()

    def _take_share(
        self, share: WriteAssignment, round: Round, flattened: Flattened, save: Save, *, anew: bool
    ) -> Flattened:
        all_replicas = anew or round.number % COMPARE_EVERY == 0  # the number is the same on all ranks
        rows = share.sometimes if all_replicas else share.always
        digests = self._replicas.digests(flattened, rows.rows)
        plan = self._planning.plan
        self._saves[save.save_id] = _SaveInProgress(round, share, flattened.tree, rows, digests, all_replicas, plan)
        return share.of(flattened)

    # -- the writing thread --------------------------------------------------------------------------------------------

    def begin(self, job: Job, attempt: Attempt) -> None:
        through(self.begin_steps(job, attempt))

    def begin_steps(self, job: Job, attempt: Attempt) -> WaitPoints[None]:
        save, under = job.save, self._saves[job.save.save_id]
        self._agreement.report(f"ready to write the save of step {save.step}")
        under.spell()
        head = {
            "attempt": attempt.id,
            "bases": [checkpoint_json(base) for base in job.bases],
            "fingerprint": under.share.fingerprint,
            "names": list(job.names),
            "step": save.step,
            "tree": under.digest,
            **rank_progress(job.about),
        }
        with under.round as round:
            round.send(RankMessage(READY, head, b"").encode())
            crashpoint("ready told, not yet begun")
            yield
            if self.coordinates:
                self._broadcast_go(round, under, job, attempt)
            message = self._rounds.received(round, save)
        crashpoint("begun, nothing written")
        self._agreement.report(f"writing its part of step {save.step}")
        under.sends_tree = self.rank in message.head["trees"]
        under.put = self._agreement.round("put", round.number)
        if self.coordinates:
            self._begin_boxes(under, save)
        else:
            self._await_begin(under.put, save)

    def _await_begin(self, put: Round, save: Save) -> None:
        """Waits until this rank sees `begin.json`, which is there. A rank that does not see it looks into another
        place, or another job has closed the save: nothing would ever remove what it puts."""
        repo, phase = self._repo, f"the save of step {save.step}"

        def visible() -> bool:
            if sees_begin(repo, save.id, save.save_id):
                return True
            put.check()
            return False

        if not becomes_visible(visible, self._deadline_s, self._agreement.session.settings.clock):
            raise RanksDisagree(
                f"{phase}: rank {self.rank} does not find it begun in {repo.url} on {socket.gethostname()}: rank 0 has "
                "begun it in another place, or it was closed since",
                subject=repo.url,
                hint=SHARE_ONE_PLACE,
                ranks=(self.rank,),
                phase=phase,
            )

    def _broadcast_go(self, round: Round, under: _SaveInProgress, job: Job, attempt: Attempt) -> None:
        posts = self._rounds.posts(round, job.save)
        if not self._rounds.alike(round, posts, READY):
            return
        try:
            for name, what in (("attempt", "the attempt"), ("fingerprint", "who writes what")):
                same([post.head[name] for post in posts], what)
            job.about = replace(job.about, progress={**job.about.progress, **shared_progress(posts)})
        except RanksDisagree as error:
            round.broadcast(refusal(error, job.save.step).encode())
            return
        job.names = [str(name) for post in posts for name in post.head["names"]] + [BOXES]
        job.bases = _bases(posts)
        begin(attempt, job.save.step, job.save.save_id, job.names, bases=job.bases)
        job.begun = True
        senders = first_of_each([post.head["tree"] for post in posts])[1:]
        round.broadcast(RankMessage(GO, {"trees": senders}, b"").encode())

    def _begin_boxes(self, under: _SaveInProgress, save: Save) -> None:
        """Begins to put the table of parts: nobody waits for it but the commit."""
        plan, repo = under.plan, self._repo
        assert plan is not None, "planned before"

        def put() -> tuple[Receipt, IndexEntry]:
            data = encode_boxes(plan.table, save.id, save.save_id, repo.id)
            return put_object(repo, save.id, BOXES, data, save.save_id)

        what = f"putting the table of parts of {save.id}"
        under.boxes = begun_within(self._deadline_s, what, put, subject=str(save.id))

    def commit(
        self,
        job: Job,
        index: Index,
        entry: IndexEntry,
        receipts: Sequence[Receipt],
        *,
        timed: bool,
        report: ManifestCallback,
    ) -> None:
        through(self.commit_steps(job, index, entry, timed=timed, told=report))

    def commit_steps(
        self, job: Job, index: Index, entry: IndexEntry, *, timed: bool, told: ManifestCallback
    ) -> WaitPoints[None]:
        save, under = job.save, self._saves[job.save.save_id]
        assert under.put is not None, "begun before"
        self._agreement.report(f"has put its part of step {save.step}")
        replicas = under.compared.of_sets(under.replicas)
        head = {
            "content": rank_digest(index),
            "index": {"digest": entry.digest.hex(), "length": entry.length, "name": entry.name, "sha256": entry.sha256},
            "bytes": save.bytes,
            **_sent_of(index),
            **({} if job.about.health is None else {"health": job.about.health.to_json()}),
            "packs": [[pack.name, pack.length] for pack in index.packs if pack.at is None],
            "replicas": len(replicas),
            "timing": own_timing(save) if timed else {},
            "tree": under.digest,
        }
        data = replicas + (under.tree.text if under.sends_tree else b"")
        with under.put as round:
            round.send(RankMessage(PUT, head, data).encode())
            crashpoint("parts put and told, manifest not yet")
            yield
            if self.coordinates:
                self._commit(round, under, job, index, timed=timed, told=told)
            message = read_message(round.receive(self._deadline_s, phase(round, save)), 0)
        if message.kind == ROWS:
            yield from self._report_rows(under, save)
        crashpoint("commit heard, not yet reported")
        self._saves.pop(save.save_id, None)
        if timed:
            save.ranks = RankTimings.read(message.head["timing"])
        if not self.coordinates:
            told(_known_manifest(save, index, message.head))

    def _commit(
        self, round: Round, under: _SaveInProgress, job: Job, index: Index, *, timed: bool, told: ManifestCallback
    ) -> None:
        plan, save, repo = under.plan, job.save, self._repo
        assert plan is not None and under.boxes is not None, "planned and begun before"
        boxes, table = under.boxes()
        posts = self._rounds.posts(round, save)
        digests = [post.data[: post.head["replicas"]] for post in posts]
        if not check_sets(plan.held, plan.replicas, plan.compared(under.all_replicas), digests):
            round.broadcast(RankMessage(ROWS, {}, b"").encode())
            return
        tree = self._tree(plan, under, save, posts)
        entries = [_entry(post.head["index"]) for post in posts]
        directory = save.id.directory
        receipts = [Receipt(f"{directory}/{entry.name}", entry.length, repo.url) for entry in entries]
        for post in posts:
            receipts += [Receipt(f"{directory}/{name}", int(length), repo.url) for name, length in post.head["packs"]]
        receipts.append(boxes)
        timings = timings_of([post.head["timing"] for post in posts])
        job.about = replace(job.about, health=_united_health(posts))
        manifest = manifest_about(
            spread_over(job.timed(), timings) if timed else job.about,
            id=save.id,
            save_id=save.save_id,
            tree=tree.value,
            indexes=tuple(entries),
            content=joint_digest(tree, plan.table, [post.head["content"] for post in posts]),
            bytes=sum(int(post.head["bytes"]) for post in posts),
            **_united(posts),
            leaves=plan.table.leaves,
            chunk_bytes=index.chunk_bytes,
            created=job.created,
            boxes=table,
        )
        told(replace(manifest, tree=None))
        round.check()  # a rank that has given up since has reported the save as failed
        commit(repo, manifest, receipts, tree=tree, own=(index,))
        crashpoint("manifest durable, not yet announced")
        facts = {"bytes": manifest.bytes, "content": manifest.content, "leaves": manifest.leaves}
        round.broadcast(RankMessage(GO, {**facts, "timing": timings.to_json()}, b"").encode())

    def _report_rows(self, under: _SaveInProgress, save: Save) -> WaitPoints[None]:
        """Fails the save on all ranks with the name of the leaf that is not the same on all that hold it."""
        assert under.put is not None
        under.put = self._agreement.round("rows", under.put.number)
        with under.put as round:
            round.send(RankMessage(ROWS, {}, under.replicas).encode())
            yield
            if self.coordinates:
                plan, digests = under.plan, [post.data for post in self._rounds.posts(round, save)]
                assert plan is not None, "planned before"
                check_replicas(plan.held, plan.replicas, plan.compared(under.all_replicas), digests)
                raise ShardMismatch(
                    f"{save.id}: replicas differed between ranks, and are equal now",
                    subject=str(save.id),
                    hint="something writes to the state while it is saved: save where training does not change it",
                )
            round.receive(self._deadline_s, phase(round, save))

    def _tree(self, plan: GroupPlan, under: _SaveInProgress, save: Save, posts: Sequence[RankMessage]) -> Spelled:
        """Returns the united tree of all ranks, with the plain values of this moment. Raises ShardMismatch where those
        differ."""
        digests = [str(post.head["tree"]) for post in posts]
        if len(set(digests)) == 1:
            return under.tree
        known: dict[str, Json] = {under.digest: under.tree.value}
        for digest, post in zip(digests, posts, strict=True):
            if digest not in known:
                known[digest] = canonical_json.loads(post.data[post.head["replicas"] :])
        union = unite([known[digest] for digest in digests], digests)
        if any(not np.array_equal(now, then) for now, then in zip(union.numbers, plan.numbers, strict=True)):
            raise SaveFailed(
                f"the structure of the state has changed since {save.id} was planned", subject=str(save.id)
            )
        return canonical_json.spell(union.tree)

    def failed(self, save: Save, error: BaseException) -> BaseException:
        under = self._saves.pop(save.save_id, None)
        if under is None:
            return error
        try:
            return self._fail_in_progress(under, save, error)
        finally:
            if under.boxes is not None:
                with contextlib.suppress(TenutoError):  # once this is over nothing is put behind what is freed now
                    under.boxes()

    def _fail_in_progress(self, under: _SaveInProgress, save: Save, error: BaseException) -> BaseException:
        round = under.put or under.round
        if round.over:
            return error
        round.fail(in_words(error), phase=f"the save of step {save.step}, {save.phase}")
        try:
            round.check()
        except RanksError as standing:
            if standing.ranks and self.rank not in standing.ranks:
                return standing  # the first error, on another rank; errors that follow from it here say less
        finally:
            round.end()
        return error

    def _forget(self) -> None:
        """Makes the next save plan anew, on every rank."""
        self._share = None

    def _skipped_step(self, step: int) -> RanksDisagree:
        return RanksDisagree(
            f"step {step} is not saved: another rank has tried to, when this one was at another save",
            subject=STEP,
            hint="save at the same steps on all ranks: later steps are saved again",
            phase=f"the save of step {step}",
        )


def _entry(record: Mapping[str, Any]) -> IndexEntry:
    return IndexEntry(
        str(record["name"]), int(record["length"]), bytes.fromhex(record["digest"]), str(record.get("sha256", ""))
    )


def _known_manifest(save: Save, index: Index, head: Mapping[str, Any]) -> Manifest:
    """Returns what a rank that does not commit knows of the manifest."""
    content, nbytes, leaves = str(head["content"]), int(head["bytes"]), int(head["leaves"])
    return Manifest(save.id, save.save_id, None, (), content, nbytes, leaves, index.chunk_bytes)
