"""Which checkpoint a restore takes while others commit."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import tenuto
from tenuto.engine.read import choose
from tenuto.errors import CheckpointNotFound, NothingRestorable, ObjectNotFound
from tenuto.model.ids import CheckpointId
from tenuto.repo.lineage import walk
from tenuto.repo.repository import Repo
from tenuto.store.contract import Reader
from tenuto.store.memory import MemoryReader, MemoryStore


def test_what_is_committed_just_after_the_walk_looked_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[str] = []

    def committed_behind_it(repo: Repo, run: str, **options: object) -> Iterator[CheckpointId]:
        walks.append(run)
        if len(walks) == 1:
            tenuto.save({"w": np.full(3, 7.0)}, tmp_path)
            return iter(())
        return walk(repo, run)

    monkeypatch.setattr(choose, "walk", committed_behind_it)
    state = {"w": np.zeros(3)}
    with tenuto.Checkpointer(tmp_path, state) as checkpointer:
        assert checkpointer.restore() is not None
    assert state["w"].tolist() == [7.0, 7.0, 7.0]
    assert len(walks) == 2


def test_a_first_checkpoint_that_is_committed_while_one_is_looked_for_is_not_stranded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[CheckpointId | None] = []
    elsewhere = choose._elsewhere

    def committed_before_it(repo: Repo, run: str) -> CheckpointId | None:
        if not looks:
            tenuto.save({"w": np.full(3, 7.0)}, tmp_path)
        looks.append(elsewhere(repo, run))
        return looks[-1]

    monkeypatch.setattr(choose, "_elsewhere", committed_before_it)
    state = {"w": np.zeros(3)}
    with tenuto.Checkpointer(tmp_path, state) as checkpointer:
        assert checkpointer.restore() is not None
    assert state["w"].tolist() == [7.0, 7.0, 7.0]
    assert looks[0] is not None


class Forgetful(MemoryStore):
    """A store of ranged reads whose open objects do not outlive their removal. `removing(name)` is called before each
    read of a pack, and says whether it is gone by then."""

    def __init__(self) -> None:
        super().__init__(str(uuid.uuid4()))
        self.removing: Callable[[str], bool] = lambda name: False

    def open(self, name: str) -> Reader:
        inner, outer = super().open(name), self

        class Far(MemoryReader):
            def view(self) -> memoryview | None:
                return None

            def read_into(self, offset: int, buffer: memoryview) -> None:
                if name.endswith(".safetensors") and outer.removing(name):
                    raise ObjectNotFound(f"there is no object {name}")
                super().read_into(offset, buffer)

        return Far(inner.name, inner.data)


@pytest.fixture(params=["its header", "a long leaf", "small leaves"])
def removed_while_read(request: pytest.FixtureRequest) -> Forgetful:
    """Steps 1 and 2; step 2 is removed when that part of its pack is about to be read."""
    store = Forgetful()
    wide = np.ones(1 << 19) if request.param == "a long leaf" else np.ones(4)
    for step in (1, 2):
        tenuto.save({"w": wide * step, "b": np.full(3, step)}, store, step=step)
    reads: list[str] = []

    def removing(name: str) -> bool:
        if "step-00000002" not in name:
            return False
        reads.append(name)
        if len(reads) == (1 if request.param == "its header" else 2):
            store.delete([other for other in list(store.place.objects) if "step-00000002/" in other])
        return name not in store.place.objects

    store.removing = removing
    return store


def test_what_is_removed_while_it_is_read_is_passed_over(removed_while_read: Forgetful) -> None:
    loaded = tenuto.load(removed_while_read)
    assert loaded.step == 1 and loaded.state["b"].tolist() == [1, 1, 1]


def test_what_is_removed_while_it_is_read_is_said_to_be_gone(removed_while_read: Forgetful) -> None:
    with pytest.raises(CheckpointNotFound, match="removed while it was being read"):
        tenuto.load(removed_while_read, step=2)


def vanishing(saved: int) -> Forgetful:
    """So many checkpoints, each of which is removed when its pack is about to be read."""
    store = Forgetful()
    for step in range(1, saved + 1):
        tenuto.save({"w": np.full(3, float(step))}, store, step=step)

    def removing(name: str) -> bool:
        store.delete([name.rpartition("/")[0] + "/manifest.json"])
        return True

    store.removing = removing
    return store


def test_choices_that_vanish_each_time_are_no_start_from_scratch() -> None:
    state = {"w": np.zeros(3)}
    with tenuto.Checkpointer(vanishing(choose.CHOICES + 1), state) as checkpointer:
        with pytest.raises(NothingRestorable, match=r"newest is now main/a0001/1"):
            checkpointer.restore()
        assert state["w"].tolist() == [0, 0, 0]


def test_where_all_of_them_vanish_there_is_none() -> None:
    with pytest.raises(CheckpointNotFound):
        tenuto.load(vanishing(choose.CHOICES))
