"""Gathers a state that dead ranks left in the memory of a job's nodes, where the ranks of this start cannot resume from
their own images: they are others, or fewer, or on other nodes, or the image of one is lost.

Whoever finds an image saves its rank's part, and together they write the checkpoint that the dead ranks would have
saved. All restore that one then. Where the image of a rank is lost, the others have whatever was replicated, which is
all of the state in many a job; the rest shows as a leaf that the line's last checkpoint has and the images do not. What
can never be replaced is what the rank had alone: its random generators then begin streams of their own, unless all
ranks had the same. A state that has more of it (`per_rank` values, a position in data that ranks do not share) is not
gathered without it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from tenuto.concurrency.process import this_process
from tenuto.crashpoints import crashpoint
from tenuto.engine.group.group import JobGroup
from tenuto.engine.memory_tier import slot_file
from tenuto.engine.memory_tier.eligibility import Candidate, EligibleImage, foreign
from tenuto.engine.memory_tier.image_store import Image, check_image, open_image
from tenuto.engine.memory_tier.listing import remove_image, sealed_of
from tenuto.engine.memory_tier.memory_restore import judged, read_id
from tenuto.engine.memory_tier.seal import Seal
from tenuto.engine.memory_tier.slot_file import LastingSlot
from tenuto.engine.memory_tier.tier import HOLD_S, POLL_S, MemoryTier
from tenuto.engine.save.job import ManifestDetails
from tenuto.engine.save.rank_group import RESTORE_TIMES, RankGroup
from tenuto.engine.staging import slots
from tenuto.engine.staging.slots import Slot, parse_name
from tenuto.errors import CheckpointNotFound, CorruptionError, KeyMissing, Superseded, TenutoError, in_words
from tenuto.maintenance.save_images import RankPart, part_of, save_parts
from tenuto.model import canonical_json
from tenuto.model.exactness import judged as judged_certificate
from tenuto.model.ids import CheckpointId, run_key
from tenuto.model.records import Json, Manifest
from tenuto.ranks.agreement import Agreement
from tenuto.ranks.kv.in_process import InProcessKVStore, SubStore, ThreadRanks
from tenuto.record import record
from tenuto.repo.format.objects import checkpoint_json
from tenuto.repo.format.small_records import encode_attempt
from tenuto.repo.ownership.claim import Attempt, announced, claim
from tenuto.repo.repository import Repo
from tenuto.sharding.holdings import rank_names
from tenuto.state.contract import Flattened
from tenuto.state.numpy_arrays import HOST
from tenuto.state.tree import (
    FIRST_RANK,
    KEYED,
    LEAVES,
    OWN,
    ROOT,
    children,
    is_plain,
    items,
    kind_of,
    leaf_paths,
    name_of,
    sequence,
    walk,
)
from tenuto.units import seconds, size

Report = Callable[[str], None]


@record
class Gathering:
    """A state to be gathered: `images` by rank of the `ranks` that sealed it, of which `lost` have none. `holders`: the
    attempts, by number and claim, that its seals name; `base`: the newest durable checkpoint of its line."""

    id: CheckpointId
    save_id: str
    ranks: int
    base: CheckpointId | None
    holders: tuple[tuple[int, str], ...]
    images: Mapping[int, tuple[int, str]]
    """Which rank of this start opens each, and the name of its slot."""

    @property
    def lost(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank not in self.images]

    def has(self, seal: Seal, rank: int) -> bool:
        """Returns whether this is the seal of an image of it, that of `rank`."""
        holder = (seal.holder.attempt, seal.holder.claim)
        return (seal.save_id, seal.rank) == (self.save_id, rank) and holder in self.holders

    @property
    def words(self) -> str:
        """It in words, the first of a sentence."""
        of = f"{len(self.images)} of " if self.lost else ""
        whose = f"{of}{self.ranks} ranks" if self.ranks > 1 else "one process"
        return f"step {self.id.step} is in the memory of {whose}"

    def to_json(self) -> Json:
        return {
            "base": None if self.base is None else checkpoint_json(self.base),
            "holders": [list(one) for one in self.holders],
            "id": checkpoint_json(self.id),
            "images": [[rank, opener, name] for rank, (opener, name) in sorted(self.images.items())],
            "ranks": self.ranks,
            "save_id": self.save_id,
        }

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Gathering:
        holders = tuple((int(attempt), str(claim)) for attempt, claim in data["holders"])
        images = {int(rank): (int(opener), str(name)) for rank, opener, name in data["images"]}
        base = None if data["base"] is None else read_id(data["base"])
        return cls(read_id(data["id"]), str(data["save_id"]), int(data["ranks"]), base, holders, images)


def gather(
    repo: Repo, run: str, tier: MemoryTier, group: RankGroup, *, report: Report, **options: Any
) -> CheckpointId | None:
    """Gathers as `MemoryGathering.gather` does, as one of the ranks of a job or as a process by itself."""
    with ExitStack() as stack:
        if isinstance(group, JobGroup):
            agreement = group.agreement
        else:
            agreement = stack.enter_context(Agreement.open(ThreadRanks(0, 1, InProcessKVStore()), {}, group.timeout_s))
        deadline_s = RESTORE_TIMES * group.timeout_s
        return MemoryGathering(repo, run, tier, agreement, deadline_s=deadline_s, report=report).gather(**options)


class MemoryGathering:
    """One rank of a job at its start, before it restores. Every rank calls `gather`."""

    def __init__(
        self, repo: Repo, run: str, tier: MemoryTier, agreement: Agreement, *, deadline_s: float, report: Report
    ) -> None:
        self._repo = repo
        self._run = run_key(run)
        self._tier = tier
        self._agreement = agreement
        self._deadline_s = deadline_s
        self._until_s = time.monotonic() + HOLD_S
        self._report: Report = report if agreement.is_coordinator else lambda message: None

    def gather(self, **options: Any) -> CheckpointId | None:
        """Saves the newest state in memory that only together these ranks can resume from, under an attempt of its own,
        which is given back; returns its checkpoint on all ranks. None where they can resume from their own images, or
        there is nothing newer than the store has. What cannot be gathered is reported, and passed over.

        `options`: of the claim. Raises RunInUse where the run has a live owner, errors of the store, and what waits for
        ranks raise.
        """
        self._agreement.report("looking for what lies in memory on other nodes")
        self._tier.await_slots()

        def choose(found: Sequence[Json]) -> Json:
            return [one.to_json() for one in wanted(self._repo, self._run, found)]

        for one in self._exchange(self._found_here(), choose, "what is in memory"):
            id = self._gathered(Gathering.read(one), options)
            if id is not None:
                return id
        return None

    def _exchange(self, own: Json, decide: Callable[[Sequence[Json]], Json], phase: str) -> Any:
        """Sends `own`; returns, the same on all ranks, what the coordinator decides from what each has sent."""
        with self._agreement.round("gather") as round:
            round.send(canonical_json.dumps(own))
            if self._agreement.is_coordinator:
                posts = [canonical_json.loads(one) for one in round.gather(self._deadline_s, phase)]
                round.broadcast(canonical_json.dumps(decide(posts)))
            return canonical_json.loads(round.receive(self._deadline_s, phase))

    def _found_here(self) -> Json:
        own = {slot.file.slot.name for slot, _ in self._tier.own_images()}
        images = [
            {
                "attempt": seal.holder.attempt,
                "claim": seal.holder.claim,
                "id": checkpoint_json(seal.id),
                "name": slot.name,
                "own": slot.name in own,
                "ranks": seal.ranks,
                "save_id": seal.save_id,
            }
            for slot, seal in sealed_of(self._repo.id, self._run)
            if not foreign(self._repo, self._run, seal)
        ]
        return {"blocked": bool(self._tier.blocked), "images": images, "node": _node()}

    # -- one state -----------------------------------------------------------------------------------------------------

    def _gathered(self, gathering: Gathering, options: dict[str, Any]) -> CheckpointId | None:
        claimed: list[Attempt] = []
        with ExitStack() as stack:
            opened: dict[int, Image] = {}
            parts: dict[int, RankPart] = {}
            told: dict[str, Json] = {"facts": [], "why": ""}
            try:
                self._open(gathering, stack, opened)
                stack.callback(parts.clear)  # before the images are closed: it is their memory
                parts.update((rank, part_of(image)) for rank, image in opened.items())
                told["facts"] = [self._facts(gathering, parts[rank], one) for rank, one in sorted(opened.items())]
            except (TenutoError, OSError) as error:
                told["why"] = in_words(error)
            crashpoint("images to be gathered are open, run not yet claimed")
            try:
                decide = partial(self._decided, gathering, claimed, options)
                answer = self._exchange(told, decide, "what is in memory together")
                if answer["why"]:
                    self._report(f"{gathering.words}, and is passed over: {answer['why']}")
                    return None
                attempt = claimed[0] if claimed else announced(self._repo, str(answer["attempt"]).encode())
                id = self._saved(gathering, attempt, parts, answer["alike"])
                if id is not None:
                    attempt.committed(id.step)
            finally:
                for attempt in claimed:
                    attempt.release()
        if id is not None:
            crashpoint("gathered state committed, still in memory")
            self._clear()
        return id

    def _clear(self) -> None:
        """Removes what nobody resumes from any more: what lies in slots that no process has taken, since their ranks
        are elsewhere now."""
        own = {slot.file.slot.name for slot, _ in self._tier.own_images()}
        for slot, _ in sealed_of(self._repo.id, self._run):
            if slot.name not in own:
                remove_image(slot)

    def _open(self, gathering: Gathering, stack: ExitStack, opened: dict[int, Image]) -> None:
        """Opens this rank's images, every byte verified. Raises CorruptionError, KeyMissing and OSError."""
        own = {slot.file.slot.name: (slot, seal) for slot, seal in self._tier.own_images()}
        for rank, (opener, name) in gathering.images.items():
            if opener != self._agreement.rank:
                continue
            image: Image | None
            if name in own:
                image = self._tier.open(Candidate(*own[name], EligibleImage(None, durable=False)))
            else:
                file = self._take(name)
                stack.callback(file.leave)
                with file.descriptor() as descriptor:
                    image = open_image(descriptor, file.name, chunk_bytes=self._repo.chunk_bytes, keys=self._repo.keys)
            if image is not None:
                stack.callback(image.close)
            if image is None or not gathering.has(image.footer, rank):
                raise CorruptionError(f"{name} in memory has changed", subject=name)
            opened[rank] = image
            check_image(image, image.repo.index(image.manifest(), rank))

    def _take(self, name: str) -> LastingSlot:
        """Locks a slot; waits for an owner that may be dying as `await_slots` does, for all slots together."""
        parent = slot_file.parent(self._repo.id, self._run)
        while True:
            try:
                return slot_file.take_slot(Slot(slots.SHARED_MEMORY, parent, name))
            except BlockingIOError as error:
                if time.monotonic() >= self._until_s:
                    raise CorruptionError(f"{name} in memory is locked by another process", subject=name) from error
            time.sleep(POLL_S)

    def _facts(self, gathering: Gathering, part: RankPart, image: Image) -> dict[str, Json]:
        """Returns what the coordinator has to know of an image where another one is lost: which entries of the base its
        rank had too, as bits; the marks of its random generators; whether it knew the position in data that ranks
        share; why it cannot do without the other, if so."""
        if not gathering.lost:
            return {}
        assert gathering.base is not None, "else it is not wanted"
        tree, base = part.flattened.tree, self._repo.manifest(gathering.base).tree
        known = all_paths(tree)
        more = set(leaf_paths(tree)).difference(leaf_paths(base))
        why = f"{min(more)} is in no checkpoint yet: what else a lost rank had is not known" if more else ""
        there = np.array([path in known for path in entries(base)], bool)
        return {
            "data": "data" in part.about.progress,
            "entries": np.packbits(there).tobytes().hex(),
            "marks": dict(part.about.marks),
            "why": why_irreplaceable(gathering, image.manifest(), part.flattened.private) or why,
        }

    def _decided(
        self, gathering: Gathering, claimed: list[Attempt], options: dict[str, Any], posts: Sequence[Json]
    ) -> Json:
        """Returns, on the coordinator, whether the state is saved, under which attempt, and which random generators all
        ranks have alike."""
        why = "; ".join(f"rank {rank}: {one['why']}" for rank, one in enumerate(posts) if one["why"])
        alike: list[str] = []
        try:
            if not why and gathering.lost:
                why, alike = self._judged_loss(gathering, [fact for one in posts for fact in one["facts"]])
            if not why:
                attempt = self._claim(gathering, claimed, options)
                return {"alike": alike, "attempt": encode_attempt(attempt.record, self._repo.id).decode(), "why": ""}
        except (CheckpointNotFound, CorruptionError, KeyMissing, Superseded) as error:
            why = error.message
        return {"alike": [], "attempt": "", "why": why}

    def _judged_loss(self, gathering: Gathering, facts: Sequence[Any]) -> tuple[str, list[str]]:
        assert gathering.base is not None, "else it is not wanted"
        base = self._repo.manifest(gathering.base)
        of = base.progress.get("ranks", len(base.indexes)) == gathering.ranks
        had = [self._repo.index(base, rank).private for rank in (gathering.lost if of else range(len(base.indexes)))]
        return judge_loss(gathering, base, had, facts)

    def _claim(self, gathering: Gathering, claimed: list[Attempt], options: dict[str, Any]) -> Attempt:
        """Claims the run to save the state. Raises CheckpointNotFound where it is not the newest any more, as an owner
        that was waited for may have saved since, or one that was claimed over."""

        def judge_again() -> None:
            verdict = _judged(self._repo, self._run, gathering.id, gathering.save_id, gathering.holders)
            if verdict != EligibleImage(gathering.base, durable=False):
                why = verdict if isinstance(verdict, str) and not claimed else _SAVED_SINCE
                raise CheckpointNotFound(why, subject=str(gathering.id))

        attempt = claim(self._repo, self._run, gathering.base, before_put=judge_again, report=self._report, **options)
        claimed.append(attempt)
        try:
            judge_again()
        except CheckpointNotFound:
            options["withdrawn"].add(attempt.number)
            raise
        return attempt

    def _saved(
        self, gathering: Gathering, attempt: Attempt, parts: Mapping[int, RankPart], alike: Sequence[str]
    ) -> CheckpointId | None:
        """Saves this rank's parts. Returns None, on all ranks, where some rank could not save its own."""
        began_s = time.monotonic()
        own: dict[str, Json] = {"id": None, "why": ""}
        try:
            if gathering.lost:
                parts = with_loss(gathering, parts, alike)
            if parts:
                session = self._agreement.session
                shared = SubStore(session.kv_store, f"gather/{session.id}/{gathering.save_id}")
                deadline_s = self._deadline_s
                saved = save_parts(self._repo, attempt, parts, gathering.ranks, shared, deadline_s=deadline_s)
                own["id"] = checkpoint_json(saved)
        except (TenutoError, OSError) as error:
            own["why"] = in_words(error)

        def decide(posts: Sequence[Json]) -> Json:
            why = "; ".join(f"rank {rank}: {one['why']}" for rank, one in enumerate(posts) if one["why"])
            return {"id": next(one["id"] for one in posts if one["id"]) if not why else None, "why": why}

        answer = self._exchange(own, decide, "saving what is in memory")
        if answer["id"] is None:
            self._report(f"{gathering.words}, and is passed over: {answer['why']}")
            return None
        id = read_id(answer["id"])
        if self._agreement.is_coordinator:
            took = f"{size(self._repo.manifest(id).bytes)} in {seconds(time.monotonic() - began_s)}"
            self._report(f"{gathering.words}: saved as {id} ({took}), which all resume from{_loss(gathering)}")
        return id


_SAVED_SINCE: Final = "the run has been saved since it was looked at"

# --------------------------------------------------------------------------------------------------
# Which state is gathered.


def wanted(repo: Repo, run: str, found: Sequence[Any]) -> list[Gathering]:
    """Returns the states to gather, in the order in which to try. found: what each rank of this start has.

    First those of which nothing is lost, newest first, up to the first one that the ranks can resume from as they are,
    or that the store has. Only where there is none, those without some ranks: the others have a newer one than the
    store.
    """
    states: dict[str, dict[int, tuple[int, Any]]] = {}
    nodes = [one["node"] for one in found]
    for finder, one in enumerate(found):
        for image in one["images"]:
            rank, _, of = parse_name(image["name"])
            at_home = of == len(found) and nodes[rank] == one["node"]
            opener = rank if at_home else nodes.index(one["node"])
            if finder == opener and (image["own"] or not at_home):  # each once; not what its own rank could not take
                states.setdefault(image["save_id"], {}).setdefault(rank, (opener, image))
    order = sorted(states.items(), key=lambda one: max(_newness(image) for _, image in one[1].values()), reverse=True)
    whole: list[Gathering] = []
    rest: list[Gathering] = []
    for save_id, images in order:
        _, first = next(iter(images.values()))
        id, ranks = read_id(first["id"]), int(first["ranks"])
        holders = tuple(sorted({(int(image["attempt"]), str(image["claim"])) for _, image in images.values()}))
        verdict = _judged(repo, run, id, save_id, holders)
        if isinstance(verdict, str):
            continue
        opens = {rank: (opener, str(image["name"])) for rank, (opener, image) in images.items()}
        state = Gathering(id, save_id, ranks, verdict.base, holders, opens)
        as_they_are = ranks == len(found) and all(rank == opener for rank, (opener, _) in opens.items())
        if verdict.durable or (as_they_are and not state.lost):
            return whole
        if not state.lost:
            whole.append(state)
        elif verdict.base is not None:
            rest.append(state)
    # An image that its own rank cannot take yet is not lost.
    return whole if any(one["blocked"] for one in found) else whole + rest


def _judged(
    repo: Repo, run: str, id: CheckpointId, save_id: str, holders: Sequence[tuple[int, str]]
) -> EligibleImage | str:
    return judged(repo, run, id, save_id, [{"attempt": attempt, "claim": claim} for attempt, claim in holders])


def _newness(image: Mapping[str, Any]) -> tuple[int, int]:
    return int(image["attempt"]), int(image["id"]["step"])


def _node() -> Json:
    """Returns what is equal for ranks that see the same images."""
    process = this_process()
    try:
        status = os.stat(slots.SHARED_MEMORY)
        return [process.host, process.boot, str(status.st_dev), str(status.st_ino)]
    except OSError:
        return [process.host, process.boot, str(process.pid), ""]


# --------------------------------------------------------------------------------------------------
# What is lost with the image of a rank.


def entries(tree: Json) -> list[str]:
    """Returns the paths of what some ranks may have and others not, without what lies within a plain value."""
    found: list[str] = []
    waiting = [("", tree)]
    while waiting:
        path, node = waiting.pop()
        below = [] if kind_of(node) in LEAVES or is_plain(node) else children(node, path)
        if below:
            waiting += below
        else:
            found.append(path or ROOT)
    return [*found, *_optimized(tree)]


def all_paths(tree: Json) -> set[str]:
    """Returns the paths of everything that a rank has."""
    return {path or ROOT for path, _ in walk(tree)}.union(_optimized(tree))


def _optimized(tree: Json) -> list[str]:
    """Returns the parameters of each group of optimizers: ranks may have different ones in the same group."""
    found: list[str] = []
    for path, node in walk(tree):
        if kind_of(node) == "optimizer" and kind_of(node["v"]) in KEYED:
            groups = dict(_named_items(node["v"])).get("param_groups", [])
            for number, group in enumerate(sequence(groups)):
                names = dict(_named_items(group)).get("params", [])
                found += [f"{path}/param_groups/{number}/params/{name_of(name)}" for name in sequence(names)]
    return found


def _named_items(node: Json) -> list[tuple[str, Json]]:
    return [(key, child) for key, child in items(node) if type(key) is str]


def why_irreplaceable(gathering: Gathering, manifest: Manifest, private: Json) -> str:
    """Returns why ranks like this one, of whose own values these are `private`, cannot do without the lost ones; empty
    if they can."""
    own = _own(private)
    if OWN in own:
        return "the state has values of each rank's own (per_rank), and those of a lost rank are in no other's memory"
    if own.get("data") is not None and "data" not in manifest.progress:
        return "each rank has a position of its own in data=, and that of a lost rank is in no other's memory"
    if 0 in gathering.lost:
        for path, node in walk(manifest.tree):
            if kind_of(node) == FIRST_RANK:
                return f"{path} was in the memory of rank 0 alone"
    return ""


def judge_loss(
    gathering: Gathering, base: Manifest, had: Sequence[Json], facts: Sequence[Any]
) -> tuple[str, list[str]]:
    """Returns why the state cannot be gathered without the lost ranks, empty if it can; and the names of the random
    generators that they had like all others: where the base says so after some steps, and those that are left still
    agree.

    had: what the base has of the lost ranks' own, or of any rank's where others saved it.
    """
    for fact in facts:
        if fact["why"]:
            return str(fact["why"]), []
    paths = entries(base.tree)
    there = np.zeros(-(-len(paths) // 8) * 8, bool)
    for fact in facts:
        there |= np.unpackbits(np.frombuffer(bytes.fromhex(fact["entries"]), np.uint8)).astype(bool)
    missing = np.flatnonzero(~there[: len(paths)])
    if len(missing):
        return f"{paths[missing[0]]} was in the memory of {rank_names(gathering.lost)} alone", []
    if not any(fact["data"] for fact in facts) and any(_own(private).get("data") is not None for private in had):
        return f"the position in data= was in the memory of {rank_names(gathering.lost)} alone", []
    marks: list[Mapping[str, str]] = [fact["marks"] for fact in facts]
    # Before any step it is the seeds alone. Whatever number of ranks has resumed from the base: what was alike has
    # stayed so, and what one process saved is alike on all.
    one = base.progress.get("ranks", 1) == 1
    alike = (sorted(marks[0]) if one else base.progress.get("alike", [])) if base.id.step > 0 else []
    return "", [str(name) for name in alike if len({one.get(name) for one in marks}) == 1]


def _own(private: Json) -> dict[Any, Json]:
    return {} if private is None else dict(items(private["v"]))


def with_loss(gathering: Gathering, parts: Mapping[int, RankPart], alike: Sequence[str]) -> dict[int, RankPart]:
    """Returns the parts with what the manifest says of the loss; beside that of the last rank that is there (not the
    first, which may have what is declared as its own), those of the lost ones, with nothing in them."""
    found = dict(parts)
    last = max(gathering.images)
    if last in parts:
        like = parts[last]
        marks = {name: mark if name in alike else "" for name, mark in like.about.marks.items()}
        for rank in gathering.lost:
            about = replace(like.about, marks=marks)
            found[rank] = replace(like, flattened=_nothing_of(like.flattened, rank), about=about)
    return {rank: replace(part, about=_about_loss(gathering, part.about, alike)) for rank, part in found.items()}


def _nothing_of(like: Flattened, rank: int) -> Flattened:
    shared = like.shared if like.shared is not None else sum(not spec.private for spec in like.specs)
    return Flattened(
        tree=like.tree,
        private=None,
        specs=(),
        sources=(),
        devices=(HOST,),
        device=(),
        fingerprint=f"{like.fingerprint} without {rank}",
        leaf=(),
        shared=shared,
    )


def _about_loss(gathering: Gathering, about: ManifestDetails, alike: Sequence[str]) -> ManifestDetails:
    certificate = about.certificate
    own = sorted(set(about.marks).difference(alike))
    if own and certificate:
        which = rank_names(gathering.lost)
        reason = f"the memory of {which} is lost: random generators ({', '.join(own)}) begin streams of their own there"
        certificate = judged_certificate({**certificate, "reasons": [*certificate.get("reasons", ()), reason]})
    return replace(about, progress={**about.progress, "lost": gathering.lost}, certificate=certificate)


def _loss(gathering: Gathering) -> str:
    return f"; what {rank_names(gathering.lost)} of {gathering.ranks} alone had is lost" if gathering.lost else ""
