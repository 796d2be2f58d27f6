"""A disk that does not give some bytes of the newest checkpoint: the one before is restored, and nothing else is
concluded from it."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import tenuto
from support.rank_threads import together
from tenuto.errors import CorruptionError, NothingRestorable, StoreDenied, StoreError
from tenuto.maintenance.retention import preview
from tenuto.model.ids import CheckpointId
from tenuto.repo.repository import Repo
from tenuto.store.local.store import LocalStore
from tenuto.store.local.syscalls import OperatingSystem
from tenuto.store.wrappers.retry import RetryingStore

PARTS = ["manifest.json", "rank-00000.index", "rank-00000.safetensors"]


class BadSectors(OperatingSystem):
    """A disk on which files below a place cannot be read: `times` times, or for good."""

    def __init__(self) -> None:
        self.bad = "nothing"
        self.number = errno.EIO
        self.times = 1 << 30
        self.refused: list[str] = []

    def pread(self, descriptor: int, buffers: Sequence[memoryview], offset: int, *, nowait: bool = False) -> int:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if self.bad in path and not nowait and len(self.refused) < self.times:
            self.refused.append(path)
            raise OSError(self.number, os.strerror(self.number))
        return super().pread(descriptor, buffers, offset, nowait=nowait)


@pytest.fixture
def disk() -> BadSectors:
    return BadSectors()


@pytest.fixture
def store(tmp_path: Path, disk: BadSectors) -> RetryingStore:
    """Steps 1 and 2."""
    found = RetryingStore(LocalStore(tmp_path, filesystem=disk))
    for step in (1, 2):
        tenuto.save({"w": np.full(3, float(step)), "big": np.full(1 << 18, float(step))}, found, step=step)
    return found


@pytest.mark.parametrize("part", PARTS)
def test_what_cannot_be_read_is_passed_over_for_the_one_before(
    store: RetryingStore, disk: BadSectors, part: str
) -> None:
    disk.bad = f"step-00000002/{part}"
    loaded = tenuto.load(store)
    assert loaded.step == 1 and loaded.state["w"].tolist() == [1, 1, 1]
    ((id, reason),) = loaded.skipped
    assert id.step == 2 and disk.bad in reason and os.strerror(errno.EIO) in reason
    assert len(disk.refused) > 1, "asked for once more"
    with pytest.raises(CorruptionError, match=r"Input/output error(.|\n)*dmesg"):
        tenuto.load(store, step=2)
    if part != "rank-00000.safetensors":
        with tenuto.open(store) as opened:
            assert opened.step == 1
    disk.bad = "/step-"
    with pytest.raises(NothingRestorable):
        tenuto.load(store)


@pytest.mark.parametrize("part", PARTS)
def test_what_the_disk_gives_at_the_second_try_is_good(store: RetryingStore, disk: BadSectors, part: str) -> None:
    disk.bad, disk.times = f"step-00000002/{part}", 1
    loaded = tenuto.load(store)
    assert loaded.step == 2 and not loaded.skipped and len(disk.refused) == 1


def test_a_store_that_denies_is_not_damage(store: RetryingStore, disk: BadSectors) -> None:
    disk.bad, disk.number = "step-00000002/rank-00000.safetensors", errno.EACCES
    with pytest.raises(StoreDenied):
        tenuto.load(store)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.filterwarnings("ignore:retention of run:tenuto.TenutoWarning")
def test_training_starts_again_by_itself(store: RetryingStore, disk: BadSectors, part: str) -> None:
    disk.bad = f"a0001/step-00000002/{part}"
    for restarts in (0, 1):
        state = {"w": np.zeros(3), "big": np.zeros(1 << 18)}
        with tenuto.Checkpointer(store, state, save=tenuto.every(steps=1)) as checkpointer:
            assert list(checkpointer.steps(3 + restarts)) == ([3] if restarts else [1, 2])
        assert state["w"].tolist() == [1, 1, 1]
    assert disk.refused, "looked at"
    repo = Repo.open(store)
    assert repo.committed("main", 3) == [4]
    if part == "manifest.json":
        assert repo.exists(CheckpointId("main", 1, 2)), "unreadable is not gone"


@pytest.mark.parametrize("part", ["manifest.json", "rank-00001.index", "rank-00001.safetensors"])
def test_of_several_ranks_all_go_to_the_one_before(tmp_path: Path, disk: BadSectors, part: str) -> None:
    store = RetryingStore(LocalStore(tmp_path, filesystem=disk))

    for step in (1, 2):
        state = {str(number): np.full(5, float(step)) for number in range(8)}
        told = together(2, lambda ranks, state=state, step=step: tenuto.save(state, store, step=step, ranks=ranks))
        assert not [one for one in told if isinstance(one, BaseException)], told
    disk.bad = f"step-00000002/{part}"
    found = together(2, lambda ranks: tenuto.load(store, ranks=ranks).step)
    assert found == [1, 1], found


def test_retention_stops_where_a_manifest_cannot_be_read(store: RetryingStore, disk: BadSectors) -> None:
    """Which checkpoint is the best by a metric is not known then."""
    disk.bad = "step-00000001/manifest.json"
    with pytest.raises(StoreError, match="Input/output error"):
        preview(Repo.open(store), "main", tenuto.keep.latest(1))
