"""Streams of Hugging Face's `datasets`: exact inside an epoch, and whole in each epoch after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import datasets
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tenuto.errors import TenutoWarning
from tenuto.state.position.positions import attach
from unit.integrations.torch_data.test_positions import Training

datasets.disable_progress_bars()
ROWS = 24


def stream(*, shuffled: bool = False) -> Any:
    rows = datasets.Dataset.from_dict({"x": [[float(i)] for i in range(ROWS)]}).to_iterable_dataset(num_shards=4)
    return (rows.shuffle(seed=3, buffer_size=8) if shuffled else rows).with_format("torch")


SOURCES: dict[str, Callable[[], Any]] = {
    "plain loader": lambda: DataLoader(stream(), batch_size=2, collate_fn=collated),
    "torchdata": lambda: StatefulDataLoader(stream(), batch_size=2, collate_fn=collated),
    "torchdata, workers": lambda: StatefulDataLoader(stream(), batch_size=2, num_workers=2, collate_fn=collated),
    "torchdata, persistent workers": lambda: StatefulDataLoader(
        stream(), batch_size=2, num_workers=2, persistent_workers=True, collate_fn=collated
    ),
}


def collated(rows: list[Any]) -> Any:
    return torch.stack([row["x"] for row in rows])


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES.keys())
@pytest.mark.parametrize("killed", [5, 12, 15])
def test_every_epoch_after_a_resume_is_whole(make: Callable[[], Any], killed: int) -> None:
    whole = Training(make)
    for _ in range(40):
        whole.step()
    pieces = Training(make)
    for _ in range(killed):
        pieces.step()
    again = Training.resume(make, pieces.save(), iterator_first=True)
    for _ in range(40 - killed):
        again.step()
    assert [(epoch, batch) for epoch, batch, _ in pieces.seen + again.seen] == [
        (epoch, batch) for epoch, batch, _ in whole.seen
    ]
    assert again.position.exact


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_what_a_shuffle_buffer_holds_is_told_to_be_lost(kind: Any) -> None:
    position = attach(kind(stream(shuffled=True), batch_size=2, collate_fn=collated))
    assert any("shuffles in a buffer" in reason for reason in position.reasons)
    assert not attach(kind(stream(), batch_size=2)).reasons


class Rewinding(IterableDataset[torch.Tensor]):
    """Begins every epoch where its state said that was loaded last, as a stream may that knows of no epochs."""

    begin = 0
    at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.begin, 12):
            self.at = number + 1
            yield torch.tensor(number)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["at"]


def test_an_epoch_that_is_shorter_after_a_resume_is_told() -> None:
    def make() -> Any:
        return DataLoader(Rewinding(), batch_size=2)

    training = Training(make)
    for _ in range(8):
        training.step()
    again = Training.resume(make, training.save(), iterator_first=True)
    with pytest.warns(TenutoWarning, match="epoch 2 ended after 4 batches, and one before the resume had 6"):
        for _ in range(10):
            again.step()
    assert not again.position.exact
