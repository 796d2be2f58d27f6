"""Status: which checkpoint is whole in which place, and what a failure of process, node or site would cost.

Wholeness is judged by listings and manifests: that every object is there and as long as it has to be. `verify` reads.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Final, Literal

from tenuto.concurrency.deadlines import within
from tenuto.engine.memory_tier.eligibility import EligibleImage
from tenuto.engine.memory_tier.listing import images
from tenuto.errors import (
    CheckpointNotFound,
    CorruptionError,
    DeadlineExceeded,
    ObjectNotFound,
    RepositoryError,
    StoreError,
    TenutoError,
)
from tenuto.maintenance.copy_record import check_target, registered_copies
from tenuto.maintenance.flush import judge_found
from tenuto.maintenance.shared_packs import packs_of
from tenuto.maintenance.tier_copies import in_place
from tenuto.model.ids import CheckpointId, run_key
from tenuto.model.records import Manifest
from tenuto.model.sizes import seconds_of
from tenuto.record import record
from tenuto.repo.format import object_names
from tenuto.repo.lineage import latest, walk
from tenuto.repo.ownership.lease import read_last
from tenuto.repo.ownership.owner_watch import OwnerFinding, OwnerWatch
from tenuto.repo.replicated.members import ANSWER_S, Member, member_in, node_of
from tenuto.repo.replicated.places import all_places, followers_of, unreachable
from tenuto.repo.repository import Repo
from tenuto.store.contract import Store
from tenuto.store.probes import read_rate
from tenuto.store.registry import open_store

Failure = Literal["process", "node", "site"]
Kind = Literal["primary", "location", "node", "tier", "copy"]
Wholeness = Literal["whole", "part", ""]
FAILURES: Final[tuple[Failure, ...]] = ("process", "node", "site")
NEWEST: Final = 4
clock = time.time
_NETWORK: Final = frozenset({"nfs", "nfs4", "lustre", "gpfs", "ceph", "beegfs", "cifs", "smb3", "glusterfs", "9p"})


@record
class Place:
    """kind: primary, location (holds copies of data files), node (a node's own disk), tier (is filled in the
    background) or copy (made by `replicate`).
    survives: the failures after which what lies there can still be read. problem: why it cannot be looked at."""

    url: str
    kind: Kind
    survives: frozenset[Failure]
    problem: str = ""


@record
class Spread:
    """Where a checkpoint is: one entry for each place of the status."""

    id: CheckpointId
    bytes: int
    created: str
    places: tuple[Wholeness, ...]


@record
class Recovery:
    """What training resumes from after a failure.

    id, created, bytes: of the newest state that survives; None, empty and 0 if nothing does.
    source: the place that has it, `memory`, or `several locations`.
    steps: how many steps behind the newest state it is. lost_s: the seconds since it was saved (the recovery point);
        of a run that nobody trains, up to the newest state.
    seconds: how long reading it takes (the recovery time); None if the place's speed is not known.
    """

    failure: Failure
    id: CheckpointId | None = None
    source: str = ""
    created: str = ""
    bytes: int = 0
    steps: int = 0
    lost_s: float | None = None
    seconds: float | None = None


@record
class RunStatus:
    """One run: its newest checkpoints, newest first. behind: for each place, how many of these it lacks above the first
    that it has whole; all of them if it has none. beat_s: the age of the owner's last beat, by the store's times."""

    run: str
    owner: OwnerFinding
    beat_s: float | None
    spread: tuple[Spread, ...]
    behind: tuple[int, ...]
    recovery: tuple[Recovery, ...]


@record
class Status:
    where: str
    at: float
    """When it was looked, in seconds since 1970."""
    places: tuple[Place, ...]
    runs: tuple[RunStatus, ...]


def status(
    repo: Repo, *, run: str | None = None, newest: int = NEWEST, rates: Mapping[str, float] | None = None
) -> Status:
    """Looks at each place, and changes nothing; the nodes' own disks come last.

    newest: how many checkpoints of a run are looked at.
    rates: bytes per second that are read from a place, by its URL; by default what `tenuto probe` has found.
    """
    found = sorted(_places(repo), key=lambda one: one[0].kind == "node")
    if rates is None:
        rates = {place.url: rate for place, _ in found if (rate := read_rate(place.url)) is not None}
    found = [_answering(place, store) for place, store in found]
    runs = [_run(repo, one, found, newest, rates) for one in ([run] if run is not None else repo.runs())]
    return Status(repo.url, clock(), tuple(place for place, _ in found), tuple(runs))


# --------------------------------------------------------------------------------------------------
# Places.


def _places(repo: Repo) -> Iterator[tuple[Place, Store | None]]:
    """Yields the places with their stores; None for one that cannot be looked at."""
    home, *others = all_places(repo.store)
    itself = member_in(home)
    kind: Kind = "primary"
    if itself is not None:
        kind = "copy" if itself.copy else "node" if itself.node else "tier" if itself.follows else "location"
    yield Place(home.url, kind, _survives(home.url, node=itself.node if itself else "", copy=kind == "copy")), home
    for store in others:
        node = node_of(store)
        yield Place(store.url, "node" if node else "location", _survives(store.url, node=node)), store
    for store in followers_of(repo.store):
        yield Place(store.url, "tier", _survives(store.url)), store
    for away in unreachable(repo.store):
        survives = _survives(away.url, node=away.node)
        yield Place(str(away), "node" if away.node else "location", survives, "not found from here"), None
    for copy in registered_copies(repo):
        place = Place(copy.url, "copy", _survives(copy.url, copy=True))
        try:
            asked = partial(_asked, repo, copy.url)
            store, member = within(ANSWER_S, f"asking {copy.url}", asked, subject=copy.url)
            if member is None or member.id != copy.member:
                raise RepositoryError(f"no copy there now; `copies/{copy.name.rpartition('/')[2]}` lists it")
        except TenutoError as error:
            yield replace(place, problem=error.message), None
        else:
            yield place, store


def _answering(place: Place, store: Store | None) -> tuple[Place, Store | None]:
    """Returns the place with its store; without one if it cannot be listed, for then nobody knows what lies there."""
    if store is not None:
        try:
            within(ANSWER_S, f"asking {place.url}", partial(store.children, object_names.RUNS), subject=place.url)
        except (StoreError, DeadlineExceeded) as error:
            return replace(place, problem=error.message), None
    return place, store


def _asked(repo: Repo, url: str) -> tuple[Store, Member | None]:
    store = open_store(url)
    return store, check_target(repo, store)


def _survives(url: str, *, node: str = "", copy: bool = False) -> frozenset[Failure]:
    """Returns the failures that a place survives: a node's own disk, and any path on a local file system, goes with
    that node; a network file system stays at the site; what has a URL is elsewhere, and so is a copy on a network file
    system."""
    if node:
        return frozenset(FAILURES[:2] if node != socket.gethostname() else FAILURES[:1])
    if url.startswith("memory://"):
        return frozenset()
    if "://" in url:
        return frozenset(FAILURES)
    if not is_network(file_system(url)):
        return frozenset(FAILURES[:1])
    return frozenset(FAILURES if copy else FAILURES[:2])


def file_system(path: str, mounts: str = "/proc/mounts") -> str:
    """Returns the type of the file system that a path lies on; empty if this system does not tell."""
    best, kind = "", ""
    try:
        with open(mounts, encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                _, point, found, *_ = line.split(" ")
                point = point.replace("\\040", " ")
                inside = path == point or path.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= len(best):
                    best, kind = point, found
    except OSError:
        return ""
    return kind


def is_network(kind: str) -> bool:
    return kind in _NETWORK or kind.startswith("fuse.")


# --------------------------------------------------------------------------------------------------
# One run.


def _run(
    repo: Repo, run: str, places: Sequence[tuple[Place, Store | None]], newest: int, rates: Mapping[str, float]
) -> RunStatus:
    spread: list[Spread] = []
    best: dict[Failure, Recovery] = {}
    memory = _in_memory(repo, run)
    found = _newest(repo, run, newest)
    top = max((id for id in (*list(found)[:1], *([memory.id] if memory and memory.id else []))), default=None)
    for id, there in found.items():
        try:
            manifest = there.manifest(id)
        except (CheckpointNotFound, CorruptionError):
            continue  # removed meanwhile, or damaged: not what training resumes from
        try:
            needed = packs_of(there, manifest)
        except (CorruptionError, StoreError):
            needed = {}  # no place can be said to have it
        listed = [_listed(store, (id, *manifest.bases)) for _, store in places]
        whole = tuple(_wholeness(manifest, needed, names) for names in listed)
        spread.append(Spread(id, manifest.bytes, manifest.created, whole))
        for failure in FAILURES:
            if failure not in best:
                left = [place for place, (one, _) in enumerate(places) if failure in one.survives]
                union = {name: length for place in left for name, length in listed[place].items()}
                if "whole" in (_wholeness(manifest, needed, union), *(whole[place] for place in left)):
                    urls = [places[place][0].url for place in left if whole[place] == "whole"]
                    best[failure] = _recovery(failure, manifest, urls, rates)
    if (
        memory is not None
        and memory.id is not None
        and ("process" not in best or not _is_newer(best["process"], memory))
    ):
        best["process"] = memory
    owner = OwnerWatch(repo, run).inspect()
    made = {one.id: one.created for one in spread} | ({memory.id: memory.created} if memory is not None else {})
    # What nobody trains comes no further than its newest state.
    idle = owner.verdict in ("free", "dead") and top is not None
    until_s = seconds_of(made.get(top, "")) if idle else clock()
    recovery = tuple(_behind(best.get(failure, Recovery(failure)), top, until_s) for failure in FAILURES)
    counts = tuple(_count_behind(spread, place) for place in range(len(places)))
    return RunStatus(run, owner, _beat_s(repo, run, owner), tuple(spread), counts, recovery)


def _newest(repo: Repo, run: str, newest: int) -> dict[CheckpointId, Repo]:
    """Returns the newest checkpoints, newest first, and who has their manifests: also the newest of each tier that
    keeps others than the primary."""
    found = dict.fromkeys(islice(walk(repo, run), newest), repo)
    for place in followers_of(repo.store):
        there = in_place(repo, place)
        try:
            id = latest(there, run)
        except StoreError:
            continue  # its column says that it has nothing
        if id is not None:
            found.setdefault(id, there)
    return dict(
        sorted(found.items(), key=lambda one: (one[0].run == run_key(run), one[0].attempt, one[0].step), reverse=True)
    )


def _listed(store: Store | None, ids: Sequence[CheckpointId]) -> dict[str, int]:
    if store is None:
        return {}
    try:
        return {entry.name: entry.length for id in ids for entry in store.walk(id.directory)}
    except StoreError:
        return {}


def _wholeness(manifest: Manifest, needed: Mapping[str, int], names: Mapping[str, int]) -> Wholeness:
    """Judges by lengths, with the names that are there. `needed`: the data files, also of others."""
    directory = manifest.id.directory
    tables = all(names.get(f"{directory}/{entry.name}") == entry.length for entry in manifest.tables)
    packs = bool(needed) and all(names.get(name) == length for name, length in needed.items())
    if tables and packs and manifest.id.manifest in names:
        return "whole"
    own = (name for name in names if name.startswith(f"{directory}/"))
    return "part" if any(map(object_names.is_pack, own)) or (manifest.bases and manifest.id.manifest in names) else ""


def _recovery(failure: Failure, manifest: Manifest, urls: Sequence[str], rates: Mapping[str, float]) -> Recovery:
    fastest = max(urls, key=lambda url: rates.get(url, 0.0), default="several locations")
    rate = rates.get(fastest)
    seconds = manifest.bytes / rate if rate else None
    return Recovery(failure, manifest.id, fastest, manifest.created, manifest.bytes, seconds=seconds)


def _in_memory(repo: Repo, run: str) -> Recovery | None:
    """Returns the newest state in this machine's memory of which all ranks' images are here."""
    states: dict[str, list[Recovery]] = {}
    ranks: dict[str, int] = {}
    for found in images(repository=repo.id):
        seal = found.footer
        if seal is None or seal.id.run != run:
            continue
        if found.alive or isinstance(judge_found(repo, found), EligibleImage):
            state = Recovery("process", seal.id, "memory", seal.created, seal.length)
            states.setdefault(seal.save_id, []).append(state)
            ranks[seal.save_id] = seal.ranks
    whole = [some for save, some in states.items() if len(some) == ranks[save]]
    newest = max(whole, key=lambda some: some[0].id or CheckpointId(run, 1, 0), default=None)
    return None if newest is None else replace(newest[0], bytes=sum(one.bytes for one in newest))


def _is_newer(one: Recovery, other: Recovery) -> bool:
    return one.id is not None and other.id is not None and one.id > other.id


def _behind(found: Recovery, top: CheckpointId | None, until_s: float | None) -> Recovery:
    """Adds how far it is behind the newest state, in steps, and behind `until_s` in time."""
    if found.id is None or top is None:
        return found
    then = seconds_of(found.created)
    lost_s = None if then is None or until_s is None else max(until_s - then, 0.0)
    return replace(found, steps=max(top.step - found.id.step, 0), lost_s=lost_s)


def _count_behind(spread: Iterable[Spread], place: int) -> int:
    count = 0
    for one in spread:
        if one.places[place] == "whole":
            break
        count += 1
    return count


def _beat_s(repo: Repo, run: str, owner: OwnerFinding) -> float | None:
    """Returns the age of the last beat; None without one, and where the clocks of store and host disagree."""
    number, _ = read_last(repo, run, owner.number) if owner.number else (0, None)
    if not number:
        return None
    name = object_names.numbered(object_names.lease_directory(run, owner.number), number)
    try:
        age = clock() - repo.store.stat(name).modified_ns / 1e9
    except ObjectNotFound:
        return 0.0  # the next beat has removed it
    return age if age >= 0 else None
