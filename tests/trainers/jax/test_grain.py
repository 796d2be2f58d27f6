"""Positions of Grain: a resumed training is given what an uninterrupted one would have been given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tenuto
from tenuto.errors import StateMismatch, UsageError

grain = pytest.importorskip("grain")

STEPS = 11
"""Over the end of the first epoch, which has 7 batches."""


class Numbers:
    def __len__(self) -> int:
        return 20

    def __getitem__(self, at: int) -> int:
        return at * at

    def __repr__(self) -> str:
        return "Numbers()"


class Nameless(Numbers):
    def __repr__(self) -> str:
        return object.__repr__(self)


def loader(source: Any = None, epochs: int = 1) -> Any:
    sampler = grain.samplers.IndexSampler(20, shuffle=True, seed=1, num_epochs=epochs)
    return grain.DataLoader(
        data_source=source or Numbers(), sampler=sampler, operations=[grain.transforms.Batch(3)], worker_count=0
    )


def mapped() -> Any:
    return grain.MapDataset.source(np.arange(20)).seed(3).shuffle().batch(3)


def streamed(mapped: Any) -> Any:
    """Reads ahead, with few threads."""
    return mapped.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=3))


MAKE: dict[str, Any] = {
    "MapDataset": mapped,
    "IterDataset": lambda: streamed(mapped()),
    "DataLoader": loader,
    "iterator": lambda: iter(streamed(mapped().repeat())),
    "repeated": lambda: streamed(mapped().repeat()),
}


def train(place: str, data: Any, upto: int) -> list[list[int]]:
    """Trains up to a step, saving each; returns the batches of these steps."""
    state = {"sum": np.zeros(1)}
    given = []
    with tenuto.Checkpointer(place, state, data=data, save=tenuto.every(steps=1), keep=tenuto.keep.all()) as ckpt:
        for _ in ckpt.steps(upto):
            batch = next(ckpt.batches)
            given.append(np.asarray(batch).tolist())
            state["sum"] += np.sum(batch)
    return given


@pytest.mark.parametrize("kind", MAKE)
def test_training_resumes_after_each_step_with_the_batches_that_follow(kind: str) -> None:
    whole = train(f"memory://{kind}-whole", MAKE[kind](), STEPS)
    for step in (2, 6, 7, 8):
        place = f"memory://{kind}-{step}"
        assert train(place, MAKE[kind](), step) + train(place, MAKE[kind](), STEPS) == whole
    with tenuto.open(f"memory://{kind}-whole") as found:
        assert found.certificate["exact"] and "position in the data" in found.certificate["covers"]


def test_an_iterator_that_is_used_up_is_told() -> None:
    with pytest.raises(UsageError, match="used up"):
        train("memory://used", iter(mapped()), STEPS)


def test_a_source_that_grain_does_not_recognise_is_told_what_to_do() -> None:
    train("memory://nameless", loader(Nameless()), 3)
    with pytest.raises(StateMismatch, match="does not take its position back") as caught:
        train("memory://nameless", loader(Nameless()), 5)
    assert "__repr__" in str(caught.value.hint)
