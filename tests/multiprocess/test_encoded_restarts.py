"""Trainings that are killed and resume from memory: what they save next rests on what is in the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tenuto
from support.memory_training import digest_of, live, shared_memory, untouched
from tenuto import Encoding, every, keep
from tenuto.maintenance.verify import assert_whole
from tenuto.model.ids import CheckpointId
from tenuto.repo.lineage import walk
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store


@pytest.mark.parametrize("encoding", ["dedupe", Encoding(delta=8)], ids=str)
def test_a_training_that_resumed_from_memory_saves_what_it_has(tmp_path: Path, encoding: Any) -> None:
    """The state in memory is newer than any checkpoint, and none may be taken for it."""
    where, expected = tmp_path / "ckpt", untouched(16)
    options = {"save": every(steps=4), "keep": keep.all(), "encoding": encoding}
    with shared_memory():
        first = live(where, 16, kill=6, **options)
        second = live(where, 16, kill=11, **options)
        third = live(where, 16, **options)
    assert first.killed and second.killed and third.status == 0
    assert (second.began, third.began) == (6, 11)
    repo = Repo.open(open_store(where))
    found = list(walk(repo, "main"))
    assert [id.step for id in found] == [16, 12, 8, 4]
    for id in found:
        assert digest_of(tenuto.load(where, step=id.step).state) == expected[id.step], id
    assert CheckpointId("main", 1, 4) in repo.manifest(found[2]).bases
    assert_whole(repo)
