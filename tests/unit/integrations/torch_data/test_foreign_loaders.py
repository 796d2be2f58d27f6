"""Loaders that wrap another, and loaders that training iterates past its Checkpointer."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

import tenuto
from tenuto import every
from tenuto.errors import TenutoWarning
from tenuto.integrations.torch.certificate import certificate
from tenuto.integrations.torch.data import iteration
from tenuto.state.position.positions import attach

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchdata.stateful_dataloader import StatefulDataLoader


class Prepared:
    """The form of accelerate's DataLoaderShard: no DataLoader, though it says so; always with state_dict; and with a
    state in it only where the wrapped loader has one."""

    def __init__(self, loader: Any) -> None:
        self.base_dataloader = loader
        if hasattr(loader, "state_dict"):
            self.dl_state_dict = loader.state_dict()

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":
            raise AttributeError
        return getattr(self.base_dataloader, name)

    @property
    def __class__(self) -> Any:
        return self.base_dataloader.__class__

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def __iter__(self) -> Iterator[Any]:
        ahead, batches = None, iter(self.base_dataloader)
        for batch in batches:
            if ahead is not None:
                yield ahead
            ahead = batch
        yield ahead

    def state_dict(self) -> Any:
        return self.dl_state_dict

    def load_state_dict(self, state: Any) -> None:
        self.base_dataloader.load_state_dict(state)


Prepared.__module__ = "accelerate.data_loader"


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_prepared_loader_is_iterated_and_no_resume_inside_its_epoch_is_certified(tmp_path: Path, kind: Any) -> None:
    torch.manual_seed(0)
    state, given = {"sum": torch.zeros(())}, []

    def train(steps: int) -> Any:
        data = Prepared(kind(TensorDataset(torch.arange(12)), batch_size=2, shuffle=True))
        with tenuto.Checkpointer(tmp_path, state, data=data, save=every(steps=1)) as ckpt:
            for _ in ckpt.steps(steps):
                given.append(next(ckpt.batches)[0].tolist())
        return tenuto.load(tmp_path).certificate

    found = train(2)
    assert not found["exact"] and "pass the DataLoader itself" in found["reasons"][0]
    with pytest.warns(TenutoWarning, match="an interrupted epoch starts again: Prepared wraps a loader"):
        train(8)
    assert sorted(sample for batch in given[2:] for sample in batch) == list(range(12)), (
        "the epoch that was begun again is given whole"
    )


def test_a_source_that_cannot_say_its_state_is_named(tmp_path: Path) -> None:
    class Source:
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at}  # type: ignore[attr-defined]

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with pytest.raises(tenuto.errors.StateError, match=r"(?s)data: state_dict\(\) of Source failed.*hint: "):
        tenuto.Checkpointer(tmp_path, {"n": 0}, data=Source())


def test_only_a_loader_in_the_middle_of_its_epoch_is_open() -> None:
    iteration.follow()
    iteration.follow()  # notes each iterator once all the same
    gc.collect()

    class Samples(TensorDataset):
        """Named as no other test's."""

    loader = DataLoader(Samples(torch.arange(6)), batch_size=2)
    name = "a DataLoader over Samples"

    def open_now(state: Any = {}) -> list[str]:  # noqa: B006
        return [one for one in iteration.iterated(state) if one == name]

    assert open_now() == []
    batches = iter(loader)
    assert open_now() == []
    next(batches)
    assert open_now() == [name]
    assert open_now({"loader": loader}) == [], "its position is in the state"
    assert not certificate({}, None)["exact"]
    assert certificate({}, attach([1]))["exact"], "what data= is was told"
    assert len(list(batches)) == 2 and open_now() == [], "given whole: a resume begins the next epoch"
    for _ in loader:
        assert open_now() == [name]
        break
    del batches
    assert open_now() == [], "left: a resume begins an epoch, as training does"


def test_a_loader_that_does_not_know_its_length_is_open_once_it_has_begun(tmp_path: Path) -> None:
    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(100))

    state = {"n": 0}
    with tenuto.Checkpointer(tmp_path, state) as ckpt:
        batches = iter(DataLoader(TensorDataset(torch.arange(100)), batch_size=2, sampler=Endless()))
        for _ in ckpt.steps(2):
            next(batches)
            ckpt.save()
    assert not certificate({}, None)["exact"]
    del batches


class Counting:
    """Gives a loader's batches, and says by itself how many."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self.given += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


def test_a_loader_inside_an_entry_that_counts_by_itself_is_known() -> None:
    iteration.follow()
    source = Counting(DataLoader(TensorDataset(torch.arange(6)), batch_size=2))
    batches = iter(source)
    next(batches)
    assert not certificate({}, None)["exact"]
    for state in ({"data": source}, {"all": {"data": [source]}}):
        assert certificate(state, None)["exact"]
    del batches


def test_iterators_of_somebodys_own_are_iterated_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another package has wrapped torch's iterators before, and where one cannot be noted."""
    made = _BaseDataLoaderIter.__init__

    @functools.wraps(made)
    def wrapped(self: Any, *arguments: Any) -> None:
        made(self, *arguments)

    class Unhashable(_SingleProcessDataLoaderIter):
        __hash__ = None  # type: ignore[assignment]

    monkeypatch.setattr(_BaseDataLoaderIter, "__init__", wrapped)
    iteration.follow()
    loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2)
    assert len(list(Unhashable(loader))) == 3
    batches = iter(loader)
    next(batches)
    assert "a DataLoader over TensorDataset" in iteration.iterated({})
    del batches
