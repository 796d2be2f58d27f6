"""Places that fail while an encoded save is written: it fails loudly or goes through, and what follows is right.

What a save names or differs from is always a checkpoint that was committed, whatever has failed since.
"""

from __future__ import annotations

import errno
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tenuto
from support.broken_places import over
from support.changing_state import State, all_come_back, bits, noise
from support.rank_threads import together
from support.thinning import crossed
from tenuto import Encoding
from tenuto.engine.save import encoded_pack, encoder
from tenuto.engine.save.encoder import EncodedPacks, StateEncoder
from tenuto.errors import CheckpointNotFound, SaveFailed
from tenuto.repo.repository import Repo
from tenuto.store.local.syscalls import OperatingSystem
from tenuto.store.registry import open_store
from tenuto.testing.layers import Fault, Faulty
from tenuto.training import exit_status
from tenuto.training.saves import RunSaver

pytestmark = pytest.mark.filterwarnings("ignore")
KIB = 1 << 10
FILES = ("begin.json", "rank-00000.pack", "rank-00000.01.pack", "rank-00000.index", "manifest.json")
CALLS = {
    "full": ("pwrite", errno.ENOSPC, "instead"),
    "broken": ("pwrite", errno.EIO, "instead"),
    "not durable": ("fsync", errno.EIO, "instead"),
    "reply lost": ("link", errno.EIO, "after"),
}


@pytest.fixture(autouse=True)
def _short_packs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several to a save; and failures on purpose do not end the test run."""
    monkeypatch.setattr(encoded_pack, "PACK_BYTES", 64 * KIB)
    monkeypatch.setattr(encoder, "BATCH_BYTES", 64 * KIB)
    yield
    exit_status._ending.failures.clear()


class Training:
    """Steps with a file system in which faults strike in chosen steps."""

    def __init__(self, where: Path, **settings: Any) -> None:
        self.where = where
        Repo.create_or_open(open_store(where), chunk_bytes=16 * KIB)
        self.disk = Faulty(OperatingSystem())
        self.state: State = {"w": noise(0, 150_000), "rows": noise(1, 60_000), "still": noise(2, 40_000)}
        self.settings = {"save": tenuto.every(steps=1), "keep": tenuto.keep.all(), **settings}
        self.committed: dict[int, Any] = {}
        self.failed: set[int] = set()

    def run(self, steps: int, faults: dict[int, Fault], *, wait: bool = True) -> None:
        """faults: by the number of steps that are done."""
        with tenuto.Checkpointer(over(self.where, self.disk), self.state, **self.settings) as ckpt:
            seen = {}
            for step in ckpt.steps(steps):
                if wait:
                    self._await(ckpt)
                    self.disk.faults = []
                if step in faults:
                    self.disk.faults = [*self.disk.faults, faults[step]]
                self.state["w"] *= type(self.state["w"][0])(1.0001)
                self.state["rows"][step * 10] += 1
                seen[step + 1] = bits(self.state)
            self._await(ckpt)
        there = {path.name for path in self.where.glob("runs/main/a*/step-*") if (path / "manifest.json").exists()}
        for step, expected in seen.items():
            manifest = next(self.where.glob(f"runs/main/a*/step-{step:08d}/manifest.json"), None)
            if manifest is not None and b'"tree"' in manifest.read_bytes():
                self.committed[step] = expected
            else:
                self.failed.add(step)
        assert there

    @staticmethod
    def _await(ckpt: Any) -> None:
        try:
            ckpt.wait()
        except SaveFailed:
            pass  # which step has failed is seen in the store


@pytest.mark.parametrize(("how", "file"), crossed([*CALLS], [*FILES]))
def test_the_save_fails_or_goes_through_and_the_next_ones_are_right(tmp_path: Path, how: str, file: str) -> None:
    call, number, when = CALLS[how]
    training = Training(tmp_path, encoding="small")
    training.run(6, {3: Fault(call, number, path=f"step-00000004/{file}", times=100, when=when)})  # type: ignore[arg-type]
    assert training.failed <= {4}
    if how != "reply lost":
        assert training.failed == {4}
    all_come_back(tmp_path, training.committed)
    assert sorted(training.committed) == [step for step in range(1, 7) if step not in training.failed]


@pytest.mark.parametrize("failing", [1, 2, 4])
def test_no_difference_is_made_to_a_state_that_was_not_committed(tmp_path: Path, failing: int) -> None:
    training = Training(tmp_path, encoding=Encoding(delta=8))
    fault = Fault("pwrite", errno.EIO, path=f"step-{failing + 1:08d}/rank-00000.01.pack", times=100)
    training.run(8, {failing: fault})
    assert training.failed == {failing + 1}
    all_come_back(tmp_path, training.committed)


@pytest.mark.parametrize("encoding", ["dedupe", "small"])
@pytest.mark.parametrize(
    "settings",
    [{"in_flight": 2}, {"memory": tenuto.every(steps=1)}, {"memory_budget": 1 << 20}, {"capture": "fenced"}],
    ids=str,
)
def test_failures_however_saves_are_taken(tmp_path: Path, encoding: Any, settings: Any) -> None:
    training = Training(tmp_path, encoding=encoding, **settings)
    faults = {
        2: Fault("pwrite", errno.EIO, path="step-00000003/rank-00000.pack", times=100),
        5: Fault("fsync", errno.EIO, path="step-00000006/rank-00000.index", times=100),
    }
    training.run(9, faults, wait=False)
    assert training.failed <= {3, 6}
    all_come_back(tmp_path, training.committed)


@pytest.mark.parametrize("pack", ["rank-00000.pack", "rank-00000.01.pack", "rank-00000.02.pack"])
def test_a_save_that_finds_room_made_continues_with_the_data_file_that_did_not_fit(
    tmp_path: Path, pack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    monkeypatch.setattr(RunSaver, "_make_room", lambda self: made.append(1) or True)
    training = Training(tmp_path, encoding=Encoding(dedupe=False))
    training.run(4, {1: Fault("pwrite", errno.ENOSPC, path=f"step-00000002/{pack}")})
    assert made == [1]
    assert not training.failed
    all_come_back(tmp_path, training.committed)


def test_an_encoding_that_broke_off_while_its_place_was_full_does_not_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room that is made helps the data file that did not fit, and brings back nothing that was never encoded."""
    monkeypatch.setattr(RunSaver, "_make_room", lambda self: True)
    bodies, broken = EncodedPacks._bodies, []

    def breaking(self: EncodedPacks, chunks: Any) -> Any:
        if self.id.step == 2 and self._packs_begun > 1:
            broken.append(self.id.step)
            raise MemoryError
        return bodies(self, chunks)

    monkeypatch.setattr(EncodedPacks, "_bodies", breaking)
    training = Training(tmp_path, encoding=Encoding(dedupe=False))
    training.run(4, {1: Fault("pwrite", errno.ENOSPC, path="step-00000002/rank-00000.pack")})
    assert broken
    assert training.failed == {2}
    all_come_back(tmp_path, training.committed)


def test_a_failed_save_leaves_no_memory_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packs: list[weakref.ref[Any]] = []
    begin = StateEncoder.begin
    encoders: list[StateEncoder] = []

    def seen(self: StateEncoder, *given: Any) -> EncodedPacks:
        found = begin(self, *given)
        packs.append(weakref.ref(found))
        encoders.append(self)
        return found

    monkeypatch.setattr(EncodedPacks, "__slots__", (), raising=False)
    monkeypatch.setattr(StateEncoder, "begin", seen)
    training = Training(tmp_path, encoding="small")
    training.run(5, {2: Fault("pwrite", errno.EIO, path="step-00000003/rank-00000.01.pack", times=100)})
    assert training.failed == {3}
    gc.collect()
    assert [one() for one in packs] == [None] * 5
    assert {one.nbytes for one in encoders} == {0}


def test_of_two_ranks_one_fails(tmp_path: Path) -> None:
    """The other one has written its part by then: what it compares with stays what both have committed."""
    Repo.create_or_open(open_store(tmp_path), chunk_bytes=16 * KIB)

    def work(ranks: Any) -> dict[int, Any]:
        disk = Faulty(OperatingSystem(), Fault("pwrite", errno.EIO, path="step-00000003/rank-00001.pack", times=100))
        whole = noise(0, 200_000)
        held = whole[100_000 * ranks.rank :][:100_000].copy()
        state = {"w": tenuto.shard(held, whole=whole.shape, offsets=(100_000 * ranks.rank,)), "still": noise(1, 50_000)}
        settings = {"save": tenuto.every(steps=1), "keep": tenuto.keep.all(), "encoding": Encoding(delta=8)}
        seen = {}
        with tenuto.Checkpointer(over(tmp_path, disk), state, ranks=ranks, **settings) as ckpt:
            for step in ckpt.steps(6):
                Training._await(ckpt)
                held *= type(held[0])(1.0001)
                seen[step + 1] = held.copy()
        return seen

    first, second = together(2, work)
    for one in (first, second):
        if isinstance(one, BaseException):
            raise one
    for step in (1, 2, 4, 5, 6):
        found = tenuto.load(tmp_path, step=step).state
        assert found["w"].tobytes() == first[step].tobytes() + second[step].tobytes(), step
        assert found["still"].tobytes() == noise(1, 50_000).tobytes()
    with pytest.raises(CheckpointNotFound):
        tenuto.load(tmp_path, step=3)
