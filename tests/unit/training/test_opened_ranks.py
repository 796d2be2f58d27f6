"""A checkpoint of several ranks, opened: leaves as wholes, any slice of them, put together from verified parts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tenuto
from support.saves_of_ranks import ROWS, save_jointly, whole
from tenuto.engine.read import sharded_reader, sharded_view
from tenuto.errors import CorruptionError, LeafNotFound, UsageError
from tenuto.repo.repository import Repo
from tenuto.store.contract import Bytes
from tenuto.store.local.store import LocalStore
from tenuto.store.local.syscalls import OperatingSystem
from tenuto.store.memory import MemoryStore


@pytest.fixture(scope="module")
def repo() -> Repo:
    """A checkpoint of three ranks."""
    repo = Repo.create_or_open(MemoryStore("opened-ranks"), chunk_bytes=512)
    save_jointly(repo, 3, (1,))
    return repo


def test_every_leaf_is_there_as_a_whole(repo: Repo) -> None:
    with tenuto.open(repo.url) as opened:
        assert opened.ranks == 3
        assert list(opened) == ["model/rows", "model/columns", "model/bias", "model/none"]
        for path, leaf in opened.items():
            wanted = whole(1)["model"][path.removeprefix("model/")]
            assert (leaf.shape, leaf.nbytes) == (wanted.shape, wanted.nbytes)
            assert np.array_equal(leaf.numpy(), wanted) and leaf.numpy().dtype == wanted.dtype
        assert opened.plain("lr") == 0.5
        assert opened.bytes_read == sum(value.nbytes for value in whole(1)["model"].values())


def test_a_leaf_says_which_rank_has_which_part(repo: Repo) -> None:
    with tenuto.open(repo.url) as opened:
        assert opened["model/columns"].parts == [(rank, (0, 20 * rank, 0), (6, 20, 4)) for rank in range(3)]
        assert [shape for _, _, shape in opened["model/bias"].parts] == [(7,)]
        assert sum(shape[0] for _, _, shape in opened["model/rows"].parts) == 90


def test_only_the_parts_that_a_slice_meets_are_read(repo: Repo) -> None:
    with tenuto.open(repo.url) as opened:
        found = opened["model/rows"][80:, 3]
        assert np.array_equal(found, whole(1)["model"]["rows"][80:, 3])
        assert 0 < opened.bytes_read < 4000


def keys(shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    def one(length: int) -> st.SearchStrategy[Any]:
        place = st.none() | st.integers(-length - 2, length + 2)
        step = st.none() | st.integers(-5, 5).filter(bool)
        return st.integers(-length, length - 1) | st.builds(slice, place, place, step)

    return st.tuples(*map(one, shape)).flatmap(
        lambda key: st.integers(0, len(key)).map(lambda count: (*key[:count], ...))
    )


@settings(max_examples=75, deadline=None, derandomize=True)
@given(st.data())
def test_any_slice_is_what_numpy_gives(repo: Repo, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["rows", "columns", "bias", "none"]))
    wanted = whole(1)["model"][name]
    key = data.draw(keys(wanted.shape) if wanted.size else st.just((slice(None), slice(None, None, -1))))
    with tenuto.open(repo.url) as opened:
        found = opened[f"model/{name}"][key]
        assert np.shape(found) == wanted[key].shape
        assert np.array_equal(found, wanted[key])


def test_a_part_whose_items_lie_apart_is_read_in_bands(repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_view, "PIECE_BYTES", 300)
    with tenuto.open(repo.url) as opened:
        for key in ((...,), (slice(None, None, -1), ...), (slice(None), slice(50, 3, -3), slice(1, None))):
            assert np.array_equal(opened["model/columns"][key], whole(1)["model"]["columns"][key])


def test_what_belongs_to_one_rank_is_there_for_it_alone(repo: Repo) -> None:
    with tenuto.open(repo.url) as opened:
        assert not [path for path in opened if path.startswith("#private")]
        with pytest.raises(LeafNotFound):
            opened["#private/mine"]
    for rank in range(3):
        with tenuto.open(repo.url, rank=rank) as opened:
            assert opened["#private/mine"].numpy().tolist() == [rank] * 2
            assert opened["#private/mine"].private
            assert opened["#private/per_rank/seed/order"].numpy().tolist() == [rank] * 3
            assert opened.plain("#private/per_rank/seed/name") == f"rank {rank}"
            assert np.array_equal(opened["model/rows"][5], whole(1)["model"]["rows"][5])
    with pytest.raises(UsageError, match="no rank 3"):
        tenuto.open(repo.url, rank=3)


def test_a_damaged_part_is_never_returned_and_the_others_are(repo: Repo) -> None:
    store = MemoryStore("opened-ranks-damaged")
    place = MemoryStore("opened-ranks").place
    store.place.objects.update(place.objects)
    name = "runs/main/a0001/step-00000001/rank-00001.safetensors"
    index = repo.index(repo.manifest(repo_id(repo)), 1)
    row = next(row for row, spec in enumerate(index.specs) if spec.path == "model/columns")
    data = bytearray(store.get(name, limit=1 << 30))
    data[int(index.offset[row])] ^= 1
    store.delete([name])
    store.put_if_absent(name, Bytes(bytes(data)), token="0" * 32)
    with tenuto.open(store.url) as opened:
        leaf = opened["model/columns"]
        assert np.array_equal(leaf[:, :20], whole(1)["model"]["columns"][:, :20])
        with pytest.raises(CorruptionError, match="model/columns"):
            leaf[0, 20]


def repo_id(repo: Repo) -> Any:
    return tenuto.open(repo.url).id


def test_reading_on_when_it_is_closed_is_refused(repo: Repo) -> None:
    opened = tenuto.open(repo.url)
    leaf = opened["model/rows"]
    opened.close()
    with pytest.raises(UsageError, match="closed"):
        leaf[0]


class Packs(OperatingSystem):
    """Counts the packs that are open."""

    def __init__(self) -> None:
        self.open_now: dict[int, str] = {}
        self.most = 0
        self._lock = threading.Lock()

    def open(self, path: str, *, direct: bool = False) -> int:
        found = super().open(path, direct=direct)
        if path.endswith(".safetensors"):
            with self._lock:
                self.open_now[found] = path
                self.most = max(self.most, len(self.open_now))
        return found

    def close(self, descriptor: int) -> None:
        with self._lock:
            self.open_now.pop(descriptor, None)
        super().close(descriptor)


RANKS = 16


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of many ranks, each with a pack of its own."""
    place = tmp_path_factory.mktemp("many")
    save_jointly(Repo.create_or_open(LocalStore(place), chunk_bytes=512), RANKS, (1,))
    return place


@pytest.fixture
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sharded_view, "OPENED_AT_ONCE", 3)
    monkeypatch.setattr(sharded_view, "FURTHER", 2)
    monkeypatch.setattr(sharded_reader, "SAVERS_AT_ONCE", 4)
    yield


@pytest.mark.usefixtures("few_at_once")
def test_of_many_ranks_few_packs_are_open_at_once(many: Path) -> None:
    packs = Packs()
    with tenuto.open(LocalStore(many, filesystem=packs)) as opened:
        assert len(packs.open_now) == 3
        for _ in range(2):
            for name in ("rows", "columns"):
                assert np.array_equal(opened[f"model/{name}"].numpy(), whole(1)["model"][name])
        assert len(packs.open_now) == 5 and packs.most == 5
        assert opened.bytes_read >= whole(1)["model"]["rows"].nbytes + whole(1)["model"]["columns"].nbytes
    assert not packs.open_now


@pytest.mark.usefixtures("few_at_once")
def test_threads_that_read_of_many_ranks_take_nothing_away_from_each_other(many: Path) -> None:
    packs = Packs()
    wanted = whole(1)["model"]["columns"]
    with tenuto.open(LocalStore(many, filesystem=packs)) as opened:
        leaf, found = opened["model/columns"], []

        def read(start: int) -> None:
            found.extend(np.array_equal(leaf[:, at], wanted[:, at]) for at in [*range(start, 60), *range(start)])

        threads = [threading.Thread(target=read, args=(7 * one,)) for one in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [True] * 8 * 60
        assert packs.most <= 3 + 2 + 8
    assert not packs.open_now


@pytest.mark.usefixtures("few_at_once")
def test_a_leaf_that_is_read_after_the_close_opens_nothing(many: Path) -> None:
    packs = Packs()
    with tenuto.open(LocalStore(many, filesystem=packs)) as opened:
        leaf = opened["model/rows"]
    for key in (..., slice(0, 1), slice(ROWS - 1, ROWS)):
        with pytest.raises(UsageError, match="is closed"):
            leaf[key]
    assert not packs.open_now


@pytest.mark.usefixtures("few_at_once")
def test_of_many_ranks_few_packs_are_open_while_what_they_have_is_cut_out(many: Path) -> None:
    packs = Packs()
    loaded = tenuto.load(LocalStore(many, filesystem=packs))
    assert np.array_equal(loaded.state["model"]["columns"], whole(1)["model"]["columns"])
    assert 0 < packs.most <= 4 and not packs.open_now
