"""Which checkpoint a restore takes while others commit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.engine import restore
from holdfast.model.names import CheckpointId
from holdfast.repo.lineage import walk
from holdfast.repo.repository import Repo


def test_what_is_committed_just_after_the_walk_looked_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[str] = []

    def committed_behind_it(repo: Repo, run: str, **options: object) -> Iterator[CheckpointId]:
        walks.append(run)
        if len(walks) == 1:
            holdfast.save({"w": np.full(3, 7.0)}, tmp_path)
            return iter(())
        return walk(repo, run)

    monkeypatch.setattr(restore, "walk", committed_behind_it)
    state = {"w": np.zeros(3)}
    with holdfast.Checkpointer(tmp_path, state) as checkpointer:
        assert checkpointer.restore() is not None
    assert state["w"].tolist() == [7.0, 7.0, 7.0]
    assert len(walks) == 2


def test_a_first_checkpoint_that_is_committed_while_one_is_looked_for_is_not_stranded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[CheckpointId | None] = []
    elsewhere = restore._elsewhere

    def committed_before_it(repo: Repo, run: str) -> CheckpointId | None:
        if not looks:
            holdfast.save({"w": np.full(3, 7.0)}, tmp_path)
        looks.append(elsewhere(repo, run))
        return looks[-1]

    monkeypatch.setattr(restore, "_elsewhere", committed_before_it)
    state = {"w": np.zeros(3)}
    with holdfast.Checkpointer(tmp_path, state) as checkpointer:
        assert checkpointer.restore() is not None
    assert state["w"].tolist() == [7.0, 7.0, 7.0]
    assert looks[0] is not None
