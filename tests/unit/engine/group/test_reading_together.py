"""Ranks of one node that read a checkpoint together: threads here, with the windows that processes have."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tenuto
from support.rank_threads import on_ranks, outcomes
from tenuto.concurrency.worker_threads import LoopThreads
from tenuto.engine.group.group_save import GroupCommit
from tenuto.engine.read import node_share, peer_window
from tenuto.engine.read.choose import fetch
from tenuto.engine.read.node_share import NodePeers, here, peers_of_each
from tenuto.engine.save.job import ManifestDetails
from tenuto.engine.save.saver import Saver
from tenuto.engine.staging import slots
from tenuto.errors import CorruptionError, StoreError
from tenuto.events import Emitter, Event, Warned
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.ranks.agreement import Agreement
from tenuto.repo.ownership.claim import claim
from tenuto.repo.repository import Repo
from tenuto.state.encode.flattener import Flattener
from tenuto.state.restore.match import match_state
from tenuto.store.memory import MemoryReader, MemoryStore

WINDOWS: set[str] = set()
SIZES = ((700, 300), (64, 96, 40), (33,), (1500, 257))


class CountingReader:
    """Reads as from far away: there is no view. Counts the bytes of each object that are asked for."""

    def __init__(self, inner: MemoryReader, count: Callable[[int, int], None], alignment: int) -> None:
        self._inner = inner
        self._count = count
        self.length = inner.length
        self.alignment = alignment

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._count(offset, len(buffer))
        stop = min(offset + len(buffer), self.length)
        self._inner.read_into(offset, buffer[: stop - offset])

    def view(self) -> None:
        return None

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> CountingReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Counting(MemoryStore):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.asked: dict[str, int] = {}
        self.alignment = 1
        self.broken: Callable[[str, int, int], None] = lambda name, offset, length: None
        self._guard = threading.Lock()

    def open(self, name: str) -> Any:
        def count(offset: int, length: int) -> None:
            self.broken(name, offset, length)
            if offset:  # headers are read by everybody
                with self._guard:
                    self.asked[name] = self.asked.get(name, 0) + length

        return CountingReader(super().open(name), count, self.alignment)


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Counting:
    return Counting(f"together {request.node.name}")


def arrays(scale: int = 1) -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(7)
    sizes = [(size[0] * scale, *size[1:]) for size in SIZES]
    return {f"leaf{number}": random.standard_normal(size).astype(np.float32) for number, size in enumerate(sizes)}


def state(rank: int, of: int, how: str, scale: int = 1, *, fill: bool = True) -> dict[str, Any]:
    """Each leaf as all of it, or split over the ranks along its first or last axis."""
    found: dict[str, Any] = {}
    for name, value in arrays(scale).items():
        held = value if fill else np.zeros_like(value)
        if how == "replicated" or value.ndim < 2:
            found[name] = tenuto.replicated(held.copy())
            continue
        axis = 0 if how == "rows" else value.ndim - 1
        ends = [value.shape[axis] * one // of for one in range(of + 1)]
        index = tuple(slice(ends[rank], ends[rank + 1]) if one == axis else slice(None) for one in range(value.ndim))
        offsets = tuple(ends[rank] if one == axis else 0 for one in range(value.ndim))
        found[name] = tenuto.shard(held[index].copy(), whole=value.shape, offsets=offsets)
    return {"model": found, "lr": 0.5}


def save(store: Counting, ranks: int, how: str, scale: int = 1) -> tuple[Repo, CheckpointId]:
    repo = Repo.create_or_open(store)
    attempt = claim(repo, "main", None)

    def work(agreement: Agreement) -> CheckpointId:
        saver = Saver(repo, "main", lasting=False, protocol=GroupCommit(repo, agreement, deadline_s=60))
        saver.attempt = attempt
        flattened = Flattener(state(agreement.rank, ranks, how, scale)).flatten()
        taken = saver.save(flattened, 1, wait=True, about=ManifestDetails(progress={"step": 1}, environment={}))
        taken.wait(60)
        saver.close()
        return taken.id

    try:
        return repo, on_ranks(ranks, work)[0]
    finally:
        attempt.release()


class Telling:
    def __init__(self, said: list[Event]) -> None:
        self._said = said

    def emit(self, event: Event) -> None:
        self._said.append(event)


def met(agreement: Agreement) -> NodePeers | None:
    with agreement.round("node") as round:
        facts = round.all_gather(canonical_json.dumps(here()), 60)
    return NodePeers.decode(agreement, peers_of_each([canonical_json.loads(one) for one in facts])[agreement.rank])


def restore(
    repo: Repo, id: CheckpointId, ranks: int, how: str, scale: int = 1, *, said: list[Event] | None = None, **more: Any
) -> list[dict[str, Any]]:
    """What each rank gets."""
    meeting = threading.Barrier(ranks, timeout=60)

    def work(agreement: Agreement) -> dict[str, Any]:
        neighbours = met(agreement)
        WINDOWS.add(f"reads/{agreement.session.id}")
        assert neighbours is not None and list(neighbours.ranks) == list(range(ranks))
        emitter = Emitter.of([] if said is None else [Telling(said)])
        patience_s = more.get("patience_s", 20.0)
        node = neighbours.reads(1, patience_s=patience_s, emitter=emitter, window_bytes=more.get("window", 8 << 20))
        into = state(agreement.rank, ranks, how, scale, fill=False)
        try:
            prepared, _ = fetch(
                repo,
                repo.manifest(id),
                lambda manifest, told: match_state(manifest.tree, told.private, told.specs, into),
                rank=agreement.rank,
                of=ranks,
                emitter=Emitter(),
                node=node,
            )
            return prepared.apply()
        finally:
            meeting.wait()
            node.close()

    found = outcomes(ranks, work)
    error = next((one for one in found if isinstance(one, BaseException)), None)
    if error is not None:
        raise error
    return list(found)


def left() -> list[str]:
    """What is there still of the windows of these tests: others may be at work beside them."""
    return [path for path, _ in slots.walk(slots.SHARED_MEMORY) if path in WINDOWS]


def equal(found: list[dict[str, Any]], how: str, scale: int = 1) -> bool:
    wanted = [state(rank, len(found), how, scale) for rank in range(len(found))]
    return all(
        np.array_equal(np.asarray(getattr(one["model"][name], "value", one["model"][name])), plain(value))
        for one, want in zip(found, wanted, strict=True)
        for name, value in want["model"].items()
    )


def plain(value: Any) -> Any:
    return np.asarray(getattr(value, "value", value))


@pytest.mark.parametrize("alignment", [1, 4096])
@pytest.mark.parametrize(
    ("savers", "saved", "readers", "how"),
    [
        (2, "rows", 4, "replicated"),
        (1, "replicated", 3, "replicated"),
        (4, "replicated", 2, "rows"),
        (3, "rows", 4, "columns"),
        (2, "columns", 3, "rows"),
        (3, "rows", 2, "rows"),
    ],
)
def test_what_several_ranks_want_is_read_once(
    store: Counting, savers: int, saved: str, readers: int, how: str, alignment: int
) -> None:
    repo, id = save(store, savers, saved)
    store.asked.clear()
    store.alignment = alignment
    found = restore(repo, id, readers, how)
    assert equal(found, how)
    nbytes = sum(value.nbytes for value in arrays().values())
    assert nbytes <= sum(store.asked.values()) <= 1.05 * nbytes + 16 * 8192
    assert not left()


def test_the_comparison_finds_a_difference(store: Counting) -> None:
    repo, id = save(store, 2, "rows")
    found = restore(repo, id, 2, "replicated")
    plain(found[1]["model"]["leaf3"])[-1, -1] += 1
    assert not equal(found, "replicated")


@pytest.mark.parametrize("how", ["replicated", "columns"])
def test_windows_are_used_again_and_stay_small(store: Counting, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    largest: list[int] = []
    whole_open = peer_window.Window.open

    def opened(self: Any, blocks: int, nbytes: int) -> None:
        largest.append(nbytes)
        whole_open(self, blocks, nbytes)

    monkeypatch.setattr(peer_window.Window, "open", opened)
    repo, id = save(store, 3, "rows", 8)
    store.asked.clear()
    assert equal(restore(repo, id, 3, how, 8, window=6 << 20), how, 8)
    nbytes = sum(value.nbytes for value in arrays(8).values())
    assert nbytes > 4 * sum(largest) and max(largest) <= 2 << 20
    assert sum(store.asked.values()) <= 1.05 * nbytes + 16 * 8192


def test_what_a_neighbour_cannot_read_each_rank_reads_for_itself(
    store: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo, id = save(store, 2, "rows")
    whole_load, failed = node_share.NodeSharedReads._load_one, []

    def load(self: node_share.NodeSharedReads, number: int) -> None:
        if self._number == 1:
            store.broken = refuse
        try:
            whole_load(self, number)
        finally:
            store.broken = lambda name, offset, length: None

    def refuse(name: str, offset: int, length: int) -> None:
        failed.append(offset)
        raise StoreError(f"{name} cannot be read", subject=name)

    monkeypatch.setattr(node_share.LoopThreads, "of", lambda processes, waiting=0: LoopThreads(1, 1))
    one_at_a_time = threading.Lock()
    monkeypatch.setattr(
        node_share.NodeSharedReads, "_load_one", lambda self, number: guarded(one_at_a_time, load, self, number)
    )
    said: list[Event] = []
    assert equal(restore(repo, id, 3, "replicated", said=said), "replicated")
    assert failed
    assert len([one for one in said if isinstance(one, Warned) and "could not be read" in one.message]) == 1


def guarded(lock: threading.Lock, work: Callable[..., None], *words: Any) -> None:
    with lock:
        work(*words)


def test_a_rank_that_stops_reading_for_others_holds_nobody_up(store: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    repo, id = save(store, 2, "rows")
    whole_load = node_share.NodeSharedReads._load
    monkeypatch.setattr(node_share.NodeSharedReads, "_load", lambda self: whole_load(self) if self._number else None)
    said: list[Event] = []
    found = restore(repo, id, 3, "replicated", patience_s=1.0, said=said)
    assert equal(found, "replicated")
    told = [one.message for one in said if isinstance(one, Warned)]
    # On a busy machine a rank may be out of patience with the others before they have said what they want.
    assert told and any(
        "rank 0 is dead, or has read nothing for 1 s" in one or "did not publish" in one for one in told
    )
    assert not left()


def test_where_there_is_no_room_a_rank_reads_for_itself_and_says_so(
    store: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo, id = save(store, 2, "rows")
    whole_open, refused = peer_window.Window.open, threading.Lock()

    def full(self: Any, blocks: int, nbytes: int) -> None:
        if refused.acquire(blocking=False):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole_open(self, blocks, nbytes)

    monkeypatch.setattr(peer_window.Window, "open", full)
    said: list[Event] = []
    assert equal(restore(repo, id, 3, "replicated", said=said), "replicated")
    told = [one.message for one in said if isinstance(one, Warned)]
    assert len(told) == 1 and "No space left" in told[0]
    assert not left()


def test_a_rank_that_has_failed_before_it_reads_is_not_waited_for(store: Counting) -> None:
    repo, id = save(store, 2, "rows")

    def work(agreement: Agreement) -> Any:
        neighbours = met(agreement)
        assert neighbours is not None
        node = neighbours.reads(1, patience_s=60.0, emitter=Emitter())
        into = state(agreement.rank, 3, "replicated", fill=False)
        try:
            if agreement.rank == 1:
                node.leave()
                return None
            prepared, _ = fetch(
                repo,
                repo.manifest(id),
                lambda manifest, told: match_state(manifest.tree, told.private, told.specs, into),
                rank=agreement.rank,
                of=3,
                emitter=Emitter(),
                node=node,
            )
            return prepared.apply()
        finally:
            meeting.wait()
            node.close()

    meeting = threading.Barrier(3, timeout=60)
    found = on_ranks(3, work)
    assert equal([found[0]], "replicated") and equal([found[2]], "replicated")


def test_damage_in_the_store_is_told_by_every_rank_that_wants_it(store: Counting) -> None:
    repo, id = save(store, 2, "rows")
    name = next(name for name in store.place.objects if name.endswith("00001.safetensors"))
    data, when = store.place.objects[name]
    hurt = bytearray(data)
    hurt[-100] ^= 1
    store.place.objects[name] = bytes(hurt), when
    with pytest.raises(CorruptionError, match="is damaged"):
        restore(repo, id, 3, "replicated")
    assert not left()


def test_damage_in_shared_memory_is_found_and_read_again(store: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    repo, id = save(store, 2, "rows")
    whole_mark, hurt = peer_window.Window.mark_read, []

    def mark(self: peer_window.Window, block: int) -> None:
        assert self._blocks is not None
        self._blocks[::4096] ^= 1
        hurt.append(block)
        whole_mark(self, block)

    monkeypatch.setattr(peer_window.Window, "mark_read", mark)
    assert equal(restore(repo, id, 2, "replicated"), "replicated")
    assert hurt


def test_what_lies_in_memory_already_is_not_read_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank sees the page cache itself."""
    store = Counting("in memory already")
    repo, id = save(store, 2, "rows")
    monkeypatch.setattr(Counting, "open", MemoryStore.open)
    monkeypatch.setattr(MemoryReader, "view", lambda self: memoryview(self.data), raising=False)
    opened: list[int] = []
    monkeypatch.setattr(peer_window.Window, "open", lambda self, blocks, nbytes: opened.append(nbytes))
    assert equal(restore(repo, id, 3, "replicated"), "replicated")
    assert not opened
