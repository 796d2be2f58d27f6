"""A model cut over the ranks, kept in memory by each: killed, it goes on to the very bits of an untouched training."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import tenuto
from support import forked_processes as forked
from tenuto.engine.memory_tier.listing import remove_image, sealed_of
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the memory tier lies in shared memory on Linux only")

PROGRAM = Path(__file__).parents[1] / "support" / "sharded_memory.py"
PATIENCE_S = 300


def job(where: Path, *words: str, ranks: int = 2) -> list[dict[str, Any]] | None:
    """What each rank has told at its end; None where the job was killed."""
    log = where.with_suffix(".log")
    status = forked.job(PROGRAM, ranks, str(where), *words, log=log, timeout=PATIENCE_S)
    if "--kill" in words:
        assert -signal.SIGKILL in status, forked.told(log, ranks)
        return None
    assert not any(status), forked.told(log, ranks)
    return [json.loads(Path(f"{where}-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("capture", [pytest.param("eager", marks=pytest.mark.long), "fenced"])
def test_a_killed_job_goes_on_from_memory_to_the_same_bits(tmp_path: Path, capture: str) -> None:
    whole = job(tmp_path / "whole")
    job(tmp_path / "parts", "--kill", "8", "--capture", capture)
    parts = job(tmp_path / "parts", "--capture", capture)
    assert whole is not None and parts is not None
    assert [told["step"] for told in parts] == [8, 8]
    assert all(told["source"].startswith("from memory, step 8, sealed ") for told in parts)
    assert [told["digest"] for told in parts] == [told["digest"] for told in whole]
    assert [told["random"] for told in parts] == [told["random"] for told in whole]
    assert whole[0]["random"] != whole[1]["random"], "each rank has a generator of its own"


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_replica_takes_the_place_of_a_lost_rank_to_the_same_bits(tmp_path: Path, lost: int) -> None:
    """The data's order is one that all ranks share, and their generators of torch are alike."""
    whole = job(tmp_path / "whole", "--ordered")
    job(tmp_path / "parts", "--ordered", "--kill", "8")
    repository = Repo.open(open_store(tmp_path / "parts")).id
    for slot, seal in sealed_of(repository, "main"):
        if seal.rank == lost:
            assert remove_image(slot)
    parts = job(tmp_path / "parts", "--ordered")
    assert whole is not None and parts is not None
    assert [told["step"] for told in parts] == [8, 8]
    assert [(told["digest"], told["random"]) for told in parts] == [(told["digest"], told["random"]) for told in whole]
    own = tenuto.open(tmp_path / "parts", step=8).certificate["reasons"]
    alone = f"the memory of rank {lost} is lost: random generators (python) begin streams of their own there"
    assert own == [alone], "the only one that is not alike, and nothing draws from it"


@pytest.mark.parametrize("durable", [pytest.param("5", marks=pytest.mark.long), "0"])
def test_buffers_that_only_the_first_rank_keeps_come_back_to_all(tmp_path: Path, durable: str) -> None:
    """Those of DistributedDataParallel, moved on by each rank's own batch; as from the store, the first rank's."""
    words = ("--replicated", "--durable", durable)
    whole = job(tmp_path / "whole", *words)
    job(tmp_path / "parts", "--kill", "8", *words)
    parts = job(tmp_path / "parts", *words)
    assert whole is not None and parts is not None
    assert [told["step"] for told in parts] == [8, 8]
    assert all(told["source"].startswith("from memory, step 8, sealed ") for told in parts)
    assert parts[0]["buffers"] == parts[1]["buffers"] != whole[0]["buffers"], "before any forward pass"
    assert [told["digest"] for told in parts] == [told["digest"] for told in whole]
    assert whole[0]["digest"] != whole[1]["digest"], "each rank's batches are its own"
