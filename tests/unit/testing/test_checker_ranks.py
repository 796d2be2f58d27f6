"""The judge of crash states puts the leaves of several ranks together by itself, and sees what is wrong with them."""

from __future__ import annotations

from typing import Any

import pytest

from support.saves_of_ranks import save_jointly, whole
from tenuto.model.ids import CheckpointId
from tenuto.repo.repository import Repo
from tenuto.store.memory import MemoryStore
from tenuto.testing.checker import check_checkpoint
from tenuto.testing.expectations import Saved


@pytest.fixture
def made() -> tuple[Repo, MemoryStore, CheckpointId, Saved]:
    store = MemoryStore("checker-ranks")
    store.place.objects.clear()
    repo = Repo.create_or_open(store, chunk_bytes=1024)
    (id,) = save_jointly(repo, 3, (1,))
    leaves = {f"model/{name}": value.tobytes() for name, value in whole(1)["model"].items()}
    for rank in range(3):
        index = repo.index(repo.manifest(id), rank)
        assert {spec.path for spec in index.specs if spec.private} == {"#private/mine", "#private/per_rank/seed/order"}
        leaves[f"#private/mine@{rank}"] = rank.to_bytes(8, "little") * 2
        leaves[f"#private/per_rank/seed/order@{rank}"] = rank.to_bytes(8, "little") * 3
    return repo, store, id, Saved(repo.manifest(id).tree, leaves)


def test_what_is_whole_passes(made: tuple[Repo, MemoryStore, CheckpointId, Saved]) -> None:
    repo, _, id, saved = made
    assert list(check_checkpoint(repo, id, saved)) == []


@pytest.mark.parametrize("file", ["boxes.index", "rank-00001.index", "rank-00002.safetensors"])
def test_what_is_gone_is_found(made: tuple[Repo, MemoryStore, CheckpointId, Saved], file: str) -> None:
    repo, store, id, saved = made
    store.delete([f"{id.directory}/{file}"])
    (problem,) = check_checkpoint(repo, id, saved)
    assert problem.startswith("I1") and file in problem


def test_other_bytes_than_were_saved_are_found(made: tuple[Repo, MemoryStore, CheckpointId, Saved]) -> None:
    repo, _, id, saved = made
    changed: dict[str, Any] = {**saved.leaves, "model/rows": b"?" * len(saved.leaves["model/rows"])}
    assert list(check_checkpoint(repo, id, Saved(saved.tree, changed))) == [
        f"I5: {id}: model/rows has other bytes than were saved"
    ]
