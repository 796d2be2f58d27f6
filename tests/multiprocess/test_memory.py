"""Ranks that keep their states in memory, as real processes: killed, damaged, on other nodes, in another number."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.repo.repository import Repo
from holdfast.store.registry import open_store
from holdfast.upkeep.verify import assert_whole
from memory_ranks import Ends, live, untouched
from memory_training import Life, shared_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the memory tier lies in shared memory on Linux only")

EXPECTED = {ranks: untouched(ranks) for ranks in (2, 3)}


@pytest.fixture
def root() -> Iterator[Path]:
    with shared_memory() as found:
        yield found


@pytest.fixture
def where(tmp_path: Path, root: Path) -> Iterator[Path]:
    yield tmp_path / "ckpts"
    if (tmp_path / "ckpts").exists():
        assert_whole(Repo.open(open_store(tmp_path / "ckpts")))


def right(*jobs: list[Life]) -> None:
    """Every step of every rank, and what each began from, is bit for bit what an untouched training has there; and all
    began at the same step."""
    for job in jobs:
        assert len({life.began for life in job}) == 1
        for rank, life in enumerate(job):
            assert life.digests, f"rank {rank} told of no step"
            wrong = [step for step, digest in life.digests.items() if digest != EXPECTED[len(job)][rank][step]]
            assert wrong == [], f"rank {rank}"


def test_a_crash_loses_at_most_one_step(where: Path, root: Path) -> None:
    first = live(where, ends={1: Ends(step=7)})
    assert all(life.killed for life in first)
    reached = min(max(life.digests) for life in first)
    second = live(where, ends={0: Ends(step=13)})
    last = live(where)
    assert [life.status for life in last] == [0, 0]
    right(first, second, last)
    assert reached - 2 <= second[0].began <= reached
    assert all(life.source.startswith("from memory, step ") for job in (second, last) for life in job)
    assert not [path for path in root.rglob("*of*")]
