"""What a repository says of itself lies there twice: either is enough, and a writer puts the other right."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import tenuto
from tenuto.errors import (
    CorruptionError,
    NotARepository,
    RepositoryError,
    StoreDenied,
    StoreError,
    StoreFull,
    TenutoWarning,
)
from tenuto.maintenance.verify import execute, plan_verify
from tenuto.repo import identity
from tenuto.repo.format.object_names import REPOSITORY, REPOSITORY_COPY
from tenuto.repo.repository import Repo
from tenuto.store.contract import Content, Receipt, Store
from tenuto.store.memory import MemoryStore
from tenuto.store.wrappers.delegating import DelegatingStore
from tenuto.training.checkpointer import Checkpointer

BOTH = (REPOSITORY, REPOSITORY_COPY)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(secrets.token_hex(8))


def flip(store: MemoryStore, name: str) -> None:
    data = bytearray(store.place.objects[name][0])
    data[30] ^= 1
    store.place.objects[name] = bytes(data), 1


def drop(store: MemoryStore, name: str) -> None:
    del store.place.objects[name]


def copies(store: MemoryStore) -> dict[str, bytes]:
    return {name: store.place.objects[name][0] for name in BOTH if name in store.place.objects}


def errors(store: MemoryStore) -> list[str | None]:
    repo = Repo.open(store)
    return [finding.object for finding in execute(repo, plan_verify(repo)).findings if finding.severity == "error"]


def trained(where: str | Store) -> np.ndarray:
    state = {"w": np.arange(8.0)}
    with Checkpointer(where, state, save=tenuto.on.end()) as ckpt:
        for _ in ckpt.steps(3):
            state["w"] += 1
    return state["w"]


@pytest.mark.parametrize("harm", [flip, drop])
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.filterwarnings("ignore:.*tenuto:tenuto.TenutoWarning")
def test_either_is_enough_and_the_next_training_puts_the_other_right(
    store: MemoryStore, name: str, harm: Callable[[MemoryStore, str], None]
) -> None:
    saved, before = trained(store), copies(store)
    id = Repo.open(store).id
    harm(store, name)
    if name == REPOSITORY:
        with pytest.warns(TenutoWarning, match="tenuto.copy.json says the same"):
            assert np.array_equal(tenuto.load(store).state["w"], saved)
    else:
        assert np.array_equal(tenuto.load(store).state["w"], saved)
    assert copies(store) != before, "reading writes nothing"
    assert (name in errors(store)) == (harm is flip or name == REPOSITORY), "verify names it"
    assert Repo.create_or_open(store).id == id
    assert copies(store) == before
    assert errors(store) == []


def test_a_flipped_bit_anywhere_in_either_is_passed_over_and_mended(store: MemoryStore) -> None:
    id = Repo.create_or_open(store).id
    before = copies(store)
    for name in BOTH:
        for at in range(0, len(before[name]), 7):
            data = bytearray(before[name])
            data[at] ^= 4
            store.place.objects[name] = bytes(data), 1
            with pytest.warns(TenutoWarning, match=name.replace(".", r"\.")):
                assert Repo.create_or_open(store).id == id
            assert copies(store) == before


def test_where_neither_is_whole_nothing_is_made_anew_and_the_error_says_what_to_do(store: MemoryStore) -> None:
    Repo.create_or_open(store)
    for name in BOTH:
        flip(store, name)
    before = copies(store)
    for act in (Repo.open, Repo.create_or_open):
        with pytest.raises(CorruptionError) as caught:
            act(store)
        assert (
            "tenuto.json is damaged" in caught.value.message and "tenuto.copy.json is damaged" in caught.value.message
        )
        assert caught.value.hint is not None and "from a backup" in caught.value.hint
    assert copies(store) == before


class Cut(DelegatingStore):
    """Fails from one change on, as if the process had ended there."""

    def __init__(self, inner: Store, after: int) -> None:
        super().__init__(inner)
        self.left = after

    def _change(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        self._change()
        return super().put_if_absent(name, content, token=token)

    def delete(self, names: object) -> None:
        self._change()
        super().delete(names)  # type: ignore[arg-type]

    def settle(self, name: str) -> None:
        self._change()
        super().settle(name)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.filterwarnings("ignore:.*:tenuto.TenutoWarning")
def test_a_process_that_ends_anywhere_while_it_mends_leaves_one_whole(name: str) -> None:
    cuts = 0
    for after in range(20):
        store = MemoryStore(secrets.token_hex(8))
        id = Repo.create_or_open(store).id
        before = copies(store)
        flip(store, name)
        try:
            Repo.create_or_open(Cut(store, after))
        except KeyboardInterrupt:
            cuts += 1
        assert any(data == before[one] for one, data in copies(store).items())
        assert Repo.open(store).id == id
        assert Repo.create_or_open(store).id == id, "no other repository is made"
        assert copies(store) == before
    assert 3 <= cuts < 20


@pytest.mark.filterwarnings("ignore:.*:tenuto.TenutoWarning")
def test_many_that_mend_at_once_end_with_the_one_repository(store: MemoryStore) -> None:
    id = Repo.create_or_open(store).id
    before = copies(store)
    for name in (*BOTH, REPOSITORY):
        flip(store, name)
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: Repo.create_or_open(MemoryStore(store.name)).id, range(16)))
        assert set(found) == {id}
        assert copies(store) == before


def test_two_that_name_two_repositories_are_refused_before_anything_is_written(store: MemoryStore) -> None:
    Repo.create_or_open(store)
    other = MemoryStore(secrets.token_hex(8))
    Repo.create_or_open(other)
    store.place.objects[REPOSITORY] = other.place.objects[REPOSITORY]
    before = copies(store)
    with pytest.raises(RepositoryError, match="are of two repositories"):
        Repo.create_or_open(store)
    assert copies(store) == before
    assert REPOSITORY_COPY in errors(store)


@pytest.mark.filterwarnings("ignore:.* is passed over:tenuto.TenutoWarning")
def test_a_load_where_another_repository_was_laid_over_says_so(store: MemoryStore) -> None:
    with Checkpointer(store, {"w": np.zeros(3)}, log="silent") as ckpt:
        ckpt.save(wait=True)
    other = MemoryStore(secrets.token_hex(8))
    Repo.create_or_open(other)
    store.place.objects[REPOSITORY] = other.place.objects[REPOSITORY]
    with pytest.raises(RepositoryError, match=r"tenuto\.json and tenuto\.copy\.json .* are of two repositories"):
        tenuto.load(store)


def test_a_single_save_into_a_new_place_leaves_the_second_to_the_next_writer(tmp_path: Path) -> None:
    """Two flushes that it shall not wait for."""
    where = tmp_path / "ckpts"
    tenuto.save({"x": 1}, where)
    assert (where / REPOSITORY).exists() and not (where / REPOSITORY_COPY).exists()
    tenuto.save({"x": 2}, where)
    assert (where / REPOSITORY_COPY).exists()
    assert tenuto.load(where).state == {"x": 2}


class NotForWriting(DelegatingStore):
    """A place that this process may only read, or that is full."""

    def __init__(self, inner: Store, error: type[StoreError]) -> None:
        super().__init__(inner)
        self.error = error

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        raise self.error(f"creating {name}")

    def delete(self, names: object) -> None:
        raise self.error("removing")


@pytest.mark.parametrize("error", [StoreDenied, StoreFull])
def test_who_may_not_write_restores_all_the_same(store: MemoryStore, error: type[StoreError]) -> None:
    saved = trained(store)
    drop(store, REPOSITORY_COPY)  # as after a single save
    closed = NotForWriting(store, error)
    state = {"w": np.zeros(8)}
    assert Checkpointer(closed, state).restore() is not None
    assert np.array_equal(state["w"], saved)
    store.place.objects[REPOSITORY_COPY] = b"damaged", 1
    with pytest.warns(TenutoWarning, match="tenuto.copy.json is not put back"):
        assert Checkpointer(closed, state).restore() is not None


def test_where_neither_lies_there_is_no_repository(store: MemoryStore) -> None:
    with pytest.raises(NotARepository):
        Repo.open(store)
    assert identity.read_identity(store) is None
