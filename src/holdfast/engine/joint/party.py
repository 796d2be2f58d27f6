"""A save that the ranks of a job take together.

Each rank posts that it is ready; the coordinator checks that all mean the same save, puts `begin.json`, and announces
that objects may be put. Each then posts what it has put, durably; the coordinator proves it, puts the table of parts
and the manifest, and announces that the checkpoint exists. What goes wrong on one rank fails the save on all of them,
by name. Training waits for others only where a structure is a new one: then all post what they hold, and hear the plan.

Nothing of the training job's own collectives is used, and every wait has a deadline (I8).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from holdfast.crashpoints import crashpoint
from holdfast.engine.describing import manifest_about
from holdfast.engine.handle import Save
from holdfast.engine.job import Job
from holdfast.engine.joint.messages import REFUSED, Post, read_post, refusal, refused
from holdfast.engine.joint.replicas import Replicas, check_replicas
from holdfast.engine.joint.sharing import JointPlan, Share, plan_together
from holdfast.engine.joint.structure import describe, understand
from holdfast.engine.joint.whereabouts import shared_progress, whereabouts
from holdfast.engine.party import Told
from holdfast.errors import RanksDisagree, RanksError, SaveFailed, ShardMismatch, in_words
from holdfast.model import canonical
from holdfast.model.canonical import Spelled
from holdfast.model.checkpoint import Index, IndexEntry, Json, Manifest, Receipt
from holdfast.plan.assign import Strategy
from holdfast.plan.union import unite
from holdfast.ranks.agreement import Agreement
from holdfast.ranks.topic import Topic
from holdfast.repo.attempts import Attempt
from holdfast.repo.boxes import encode_boxes
from holdfast.repo.commit import begin, commit
from holdfast.repo.content import joint_digest, rank_digest
from holdfast.repo.layout import BOXES
from holdfast.repo.packs import put_object
from holdfast.repo.repository import Repo
from holdfast.state.contract import Flattened

SAVE_DEADLINE_S: Final = 600.0
"""How long the slowest rank may be behind the fastest. One that is dead or stopped is found out much earlier."""
COMPARE_EVERY: Final = 50
"""Saves after which replicas that are declared to be equal are compared again."""
GO, PLAN, AGAIN = "go", "plan", "again"
READY, NEW, PUT = "ready", "new", "put"
STEP: Final = "the step that is saved"


@dataclass(slots=True)
class _Under:
    """One save under way. `round`: the topic in which ranks say that they are ready; `put`: that they have put their
    parts. `all_replicas`: whether those that are declared to be equal are compared too."""

    round: Topic
    share: Share
    tree: Spelled
    digest: str
    replicas: bytes
    all_replicas: bool
    plan: JointPlan | None
    """On the coordinator. A later save may have been planned anew while this one is still being written."""
    tells_tree: bool = True
    put: Topic | None = None


class Together:
    """The ranks of one job and run, saving together. Each of them calls the same methods for the same saves."""

    def __init__(
        self, repo: Repo, agreement: Agreement, *, strategy: Strategy = "balanced", deadline_s: float = SAVE_DEADLINE_S
    ) -> None:
        self._repo = repo
        self._agreement = agreement
        self._strategy: Strategy = strategy
        self._deadline_s = deadline_s
        self._share: Share | None = None
        self._plan: JointPlan | None = None
        """On the coordinator: of the structure that was planned last."""
        self._under: dict[str, _Under] = {}
        self._taken = 0
        self._refused_through = -1
        """The last step that a rank had come to where the ranks were not at one. Who comes to it later fails it by
        himself: so all are at the same save again after it."""
        self._replicas = Replicas()

    @property
    def rank(self) -> int:
        return self._agreement.rank

    @property
    def coordinates(self) -> bool:
        return self._agreement.is_coordinator

    @property
    def several(self) -> bool:
        return self._agreement.world_size > 1

    # -- the training thread -------------------------------------------------------------------------------------------

    def take(self, flattened: Flattened, save: Save) -> Flattened:
        """What this rank writes of it. Raises RankFailed, RanksMissing, RanksDisagree and ShardMismatch."""
        if save.step <= self._refused_through:
            raise self._passed_over(save.step)
        agreement = self._agreement
        topic = agreement.topic("save")
        save.save_id = hashlib.sha256(f"{agreement.session.id} {topic.number}".encode()).hexdigest()[:32]
        share, planned = self._share, b""
        anew = share is None or share.own != flattened.fingerprint
        if anew:
            save.phase = "planning who writes what"
            agreement.report(f"planning the save of step {save.step}")
            with topic:
                planned = self._planned(topic, flattened, save)
            topic = agreement.topic("save")
        try:
            if share is None or anew:
                share = self._share = Share(planned, flattened, self.rank)
            return self._taken_by(share, topic, flattened, save, anew=anew)
        except BaseException as error:
            self._cannot(topic, save.step, error)
            raise

    def missed(self, step: int, error: BaseException) -> None:
        """This rank has come to no more than its wish to save `step`."""
        if step > self._refused_through:
            self._cannot(self._agreement.topic("save"), step, error)

    def _cannot(self, topic: Topic, step: int, error: BaseException) -> None:
        topic.fail(in_words(error), phase=f"the save of step {step}")
        topic.end()

    def _taken_by(self, share: Share, topic: Topic, flattened: Flattened, save: Save, *, anew: bool) -> Flattened:
        all_replicas = anew or self._taken % COMPARE_EVERY == 0
        self._taken += 1
        digests = self._replicas.digests(flattened, share.sometimes if all_replicas else share.always)
        tree = canonical.spell(flattened.tree)
        digest = hashlib.sha256(tree.text).hexdigest()
        self._under[save.save_id] = _Under(topic, share, tree, digest, digests, all_replicas, self._plan)
        return share.of(flattened)

    def _planned(self, topic: Topic, flattened: Flattened, save: Save) -> bytes:
        """This rank's part of the plan for a structure that is new to it."""
        topic.post(Post(NEW, {"step": save.step}, describe(flattened)).encode())
        crashpoint("structure told, plan not yet heard")
        if self.coordinates:
            posts = self._posts(topic, save)
            self._announce_plan(topic, posts)
        heard = self._heard(topic, save)
        offsets = [0, *np.cumsum(heard.head["lengths"]).tolist()]
        return heard.data[offsets[self.rank] : offsets[self.rank + 1]]

    def _posts(self, topic: Topic, save: Save) -> list[Post]:
        """On the coordinator: of all ranks."""
        return [read_post(data, rank) for rank, data in enumerate(topic.collect(self._deadline_s, _phase(topic, save)))]

    def _heard(self, topic: Topic, save: Save) -> Post:
        """What is announced of a save that goes on."""
        heard = read_post(topic.hear(self._deadline_s, _phase(topic, save)), 0)
        if heard.kind == AGAIN:
            self._forget()
            raise self._again(save)
        if heard.kind == REFUSED:
            self._refused_through = max(self._refused_through, int(heard.head["through"]))
            raise refused(heard, f"the save of step {save.step}")
        return heard

    def _announce_plan(self, topic: Topic, posts: Sequence[Post]) -> None:
        """On the coordinator: the plan; that all must say anew what they hold, since some did not; or why there is
        none."""
        steps = [int(post.head["step"]) for post in posts]
        if len(set(steps)) == 1 and any(post.kind != NEW for post in posts):
            topic.announce(Post(AGAIN, {}, b"").encode())
            return
        try:
            self._same(steps, STEP)
            said = [understand(post.data, rank) for rank, post in enumerate(posts)]
            plan = plan_together(said, strategy=self._strategy, chunk_bytes=self._repo.chunk_bytes)
        except (RanksDisagree, ShardMismatch) as error:
            topic.announce(refusal(error, max(steps)).encode())
            return
        self._plan = plan
        lengths = [len(share) for share in plan.shares]
        topic.announce(Post(PLAN, {"lengths": lengths}, b"".join(plan.shares)).encode())

    # -- the writing thread --------------------------------------------------------------------------------------------

    def begin(self, job: Job, attempt: Attempt) -> None:
        save, under = job.save, self._under[job.save.save_id]
        self._agreement.report(f"ready to write the save of step {save.step}")
        head = {
            "attempt": attempt.id,
            "fingerprint": under.share.fingerprint,
            "names": list(job.names),
            "step": save.step,
            **whereabouts(job.about),
        }
        with under.round as topic:
            topic.post(Post(READY, head, b"").encode())
            crashpoint("ready told, not yet begun")
            if self.coordinates:
                self._announce_go(topic, under, job, attempt)
            heard = self._heard(topic, save)
        crashpoint("begun, nothing written")
        under.tells_tree = heard.head["tree"] != under.digest
        under.put = self._agreement.topic("put", topic.number)

    def _announce_go(self, topic: Topic, under: _Under, job: Job, attempt: Attempt) -> None:
        posts = self._posts(topic, job.save)
        if any(post.kind != READY for post in posts):
            self._announce_plan(topic, posts)
            return
        try:
            for name, what in (("attempt", "the attempt"), ("step", STEP), ("fingerprint", "who writes what")):
                self._same([post.head[name] for post in posts], what)
            job.about = replace(job.about, progress={**job.about.progress, **shared_progress(posts)})
        except RanksDisagree as error:
            topic.announce(refusal(error, max(int(post.head["step"]) for post in posts)).encode())
            return
        job.names = [str(name) for post in posts for name in post.head["names"]] + [BOXES]
        begin(attempt, job.save.step, job.save.save_id, job.names)
        job.begun = True
        topic.announce(Post(GO, {"tree": under.digest}, b"").encode())

    def commit(
        self, job: Job, index: Index, entry: IndexEntry, receipts: Sequence[Receipt], *, timed: bool, told: Told
    ) -> None:
        save, under = job.save, self._under[job.save.save_id]
        assert under.put is not None, "begun before"
        self._agreement.report(f"has put its part of step {save.step}")
        head = {
            "content": rank_digest(index),
            "index": {"digest": entry.digest.hex(), "length": entry.length, "name": entry.name},
            "packs": [[pack.name, pack.length] for pack in index.packs],
            "replicas": len(under.replicas),
            "tree": under.digest,
        }
        data = under.replicas + (under.tree.text if under.tells_tree else b"")
        with under.put as topic:
            topic.post(Post(PUT, head, data).encode())
            crashpoint("parts put and told, manifest not yet")
            if self.coordinates:
                self._commit(topic, under, job, index, timed=timed, told=told)
            heard = read_post(topic.hear(self._deadline_s, _phase(topic, save)), 0)
        crashpoint("commit heard, not yet reported")
        self._under.pop(save.save_id, None)
        if not self.coordinates:
            told(_told(save, index, heard.head))

    def _commit(self, topic: Topic, under: _Under, job: Job, index: Index, *, timed: bool, told: Told) -> None:
        plan, save, repo = under.plan, job.save, self._repo
        posts = self._posts(topic, save)
        assert plan is not None, "planned before"
        digests = [post.data[: post.head["replicas"]] for post in posts]
        check_replicas(plan.held, plan.replicas, plan.compared(under.all_replicas), digests)
        tree = self._tree(plan, under, save, posts)
        entries = [_entry(post.head["index"]) for post in posts]
        directory = save.id.directory
        receipts = [Receipt(f"{directory}/{entry.name}", entry.length, repo.url) for entry in entries]
        for post in posts:
            receipts += [Receipt(f"{directory}/{name}", int(length), repo.url) for name, length in post.head["packs"]]
        boxes, table = put_object(repo, save.id, BOXES, encode_boxes(plan.table, save.id, save.save_id), save.save_id)
        receipts.append(boxes)
        manifest = manifest_about(
            job.timed() if timed else job.about,
            id=save.id,
            save_id=save.save_id,
            tree=tree.value,
            indexes=tuple(entries),
            content=joint_digest(tree, table.digest, [post.head["content"] for post in posts]),
            bytes=sum(int(length) for post in posts for _, length in post.head["packs"]),
            leaves=plan.table.leaves,
            chunk_bytes=index.chunk_bytes,
            created=job.created,
            boxes=table,
        )
        told(replace(manifest, tree=None))
        topic.check()  # a rank that has given up since has reported the save as failed
        commit(repo, manifest, receipts, tree=tree)
        crashpoint("manifest durable, not yet announced")
        said = {"bytes": manifest.bytes, "content": manifest.content, "leaves": manifest.leaves}
        topic.announce(Post(GO, said, b"").encode())

    def _tree(self, plan: JointPlan, under: _Under, save: Save, posts: Sequence[Post]) -> Spelled:
        """The tree of this moment: that of all ranks, plain values included. ShardMismatch where those differ."""
        digests = [str(post.head["tree"]) for post in posts]
        if len(set(digests)) == 1:
            return under.tree
        known: dict[str, Json] = {under.digest: under.tree.value}
        for digest, post in zip(digests, posts, strict=True):
            if digest not in known:
                known[digest] = canonical.loads(post.data[post.head["replicas"] :])
        union = unite([known[digest] for digest in digests], digests)
        if any(not np.array_equal(now, then) for now, then in zip(union.numbers, plan.numbers, strict=True)):
            raise SaveFailed(
                f"the structure of the state has changed since {save.id} was planned", subject=str(save.id)
            )
        return canonical.spell(union.tree)

    def failed(self, save: Save, error: BaseException) -> BaseException:
        under = self._under.pop(save.save_id, None)
        topic = None if under is None else under.put or under.round
        if topic is None or topic.over:
            return error
        topic.fail(in_words(error), phase=f"the save of step {save.step}, {save.phase}")
        try:
            topic.check()
        except RanksError as standing:
            if standing.ranks and self.rank not in standing.ranks:
                return standing  # what another met first: what follows here, objects freed under its hands, says less
        finally:
            topic.end()
        return error

    def _forget(self) -> None:
        """The next save is planned anew, on every rank."""
        self._share = None

    def _again(self, save: Save) -> SaveFailed:
        return SaveFailed(
            f"{save.id} was not saved: the structure of the state has changed on some ranks and not on others",
            subject=str(save.id),
            hint="the next save is planned anew; save at the same steps on all ranks",
        )

    def _passed_over(self, step: int) -> RanksDisagree:
        return RanksDisagree(
            f"step {step} is not saved: another rank has tried to, when this one was at another save",
            subject=STEP,
            hint="save at the same steps on all ranks: later steps are saved again",
            phase=f"the save of step {step}",
        )

    def _same(self, values: Sequence[Any], what: str) -> None:
        if len(set(values)) > 1:
            said = ", ".join(f"rank {rank}: {value}" for rank, value in list(enumerate(values))[:8])
            hint = "save at the same steps on all ranks" if what == STEP else None
            raise RanksDisagree(f"the ranks do not agree about {what} ({said})", subject=what, hint=hint)


def _phase(topic: Topic, save: Save) -> str:
    return f"{topic.phase} (step {save.step})"


def _entry(said: Mapping[str, Any]) -> IndexEntry:
    return IndexEntry(str(said["name"]), int(said["length"]), bytes.fromhex(said["digest"]))


def _told(save: Save, index: Index, head: Mapping[str, Any]) -> Manifest:
    """What a rank that does not commit knows of the manifest."""
    content, nbytes, leaves = str(head["content"]), int(head["bytes"]), int(head["leaves"])
    return Manifest(save.id, save.save_id, None, (), content, nbytes, leaves, index.chunk_bytes)
