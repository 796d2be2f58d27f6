"""A manifest that is too long to be told to all: each rank reads it for itself, and all go on from the same one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.rank_threads import together
from tenuto.engine.group import group_restore
from tenuto.errors import CheckpointNotFound
from tenuto.events import CandidateSkipped
from tenuto.ranks.round import Round
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store


class Skipped(list[str]):
    def emit(self, event: object) -> None:
        if isinstance(event, CandidateSkipped):
            self.append(event.reason)


def state(ranks: Any, value: float) -> dict[str, Any]:
    mine = np.full(4, value + ranks.rank)
    return {"w": tenuto.shard(mine, whole=(3, 4), offsets=(ranks.rank, 0)), "value": value}


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(group_restore, "BROADCAST_BYTES", 0)
    for step in (1, 2):
        together(3, lambda ranks, step=step: tenuto.save(state(ranks, 10.0 * step), tmp_path, step=step, ranks=ranks))
    return tmp_path


def loaded(where: Path, skipped: Skipped | None = None) -> list[Any]:
    sinks = [] if skipped is None else [skipped]
    return together(3, lambda ranks: tenuto.load(where, state(ranks, -1.0), ranks=ranks, sinks=sinks))


def test_each_rank_reads_it_and_none_is_told(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    announced: list[bytes] = []
    original = Round.broadcast

    def announce(self: Round, data: bytes, each: Any = ()) -> None:
        announced.append(data)
        original(self, data, each)

    monkeypatch.setattr(Round, "broadcast", announce)
    found = loaded(saved)
    for rank, restored in enumerate(found):
        assert restored.step == 2 and restored.state["w"].value.tolist() == [20.0 + rank] * 4
    manifest = Repo.open(open_store(saved)).manifest_bytes(found[0].checkpoint.id)
    assert len(manifest) > 100 and announced and not any(manifest in one for one in announced)
    monkeypatch.setattr(group_restore, "BROADCAST_BYTES", len(manifest))
    loaded(saved)
    assert sum(manifest in one for one in announced) == 1, "a short one is told, once for all"


def test_one_that_is_gone_for_one_rank_is_passed_over_by_all(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = group_restore.GroupRestore._found

    def found(self: Any, id: Any, mark: str, told: bytes) -> bytes:
        assert not told
        if self.group.rank == 2 and id.step == 2:
            raise CheckpointNotFound(f"{id} is gone", subject=str(id))
        return original(self, id, mark, told)

    monkeypatch.setattr(group_restore.GroupRestore, "_found", found)
    skipped = Skipped()
    assert [restored.step for restored in loaded(saved, skipped)] == [1, 1, 1]
    assert len(skipped) == 3 and all("is gone" in reason and "rank 2" in reason for reason in skipped)


def test_one_that_is_another_for_one_rank_is_passed_over_by_all(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Repo.manifest_bytes
    asked: list[int] = []

    def manifest_bytes(self: Repo, id: Any) -> bytes:
        asked.append(id.step)
        data = original(self, id)
        return data if id.step == 1 or asked.count(2) < 3 else data + b" "

    monkeypatch.setattr(Repo, "manifest_bytes", manifest_bytes)
    skipped = Skipped()
    assert [restored.step for restored in loaded(saved, skipped)] == [1, 1, 1]
    assert any("not the one that the coordinator has read" in reason for reason in skipped)
