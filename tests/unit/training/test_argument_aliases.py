"""Names of other libraries, and what they are translated to."""

from __future__ import annotations

from pathlib import Path

import pytest

import tenuto
from support.tiny_training import state, steps_of
from tenuto import every, keep
from tenuto.errors import PolicyConflict, UsageError
from tenuto.training.arguments import ArgumentAliases

DEFAULT = "every(minutes=10) | on.end() | on.signal()"


@pytest.mark.parametrize(
    ("given", "saves", "keeps"),
    [
        ({}, "None", "None"),
        ({"max_to_keep": 5}, "None", "keep.latest(5)"),
        ({"save_top_k": -1}, "None", "keep.all()"),
        ({"save_top_k": -1, "monitor": "loss", "save_last": True}, "None", "keep.all()"),
        ({"save_top_k": 1}, "None", "keep.latest(1)"),
        ({"save_last": True}, "None", "keep.latest(1)"),
        ({"save_last": False}, "None", "None"),
        ({"save_top_k": 0, "save_last": True}, "None", "keep.latest(1)"),
        (
            {"monitor": "loss"},
            f"{DEFAULT} | on.improve('loss', mode='min')",
            "keep.best(1, 'loss', mode='min')",
        ),
        (
            {"monitor": "acc", "mode": "max", "save_top_k": 1, "save_last": True},
            f"{DEFAULT} | on.improve('acc', mode='max')",
            "keep.best(1, 'acc', mode='max') | keep.latest(1)",
        ),
    ],
)
def test_what_the_names_mean(given: dict[str, object], saves: str, keeps: str) -> None:
    save, kept = ArgumentAliases(**given).policies(None, None)  # type: ignore[arg-type]
    assert (repr(save), repr(kept)) == (saves, keeps)


@pytest.mark.parametrize(
    "given",
    [
        {"save_top_k": 3},
        {"save_top_k": 0},
        {"save_top_k": 0, "monitor": "loss"},
        {"mode": "max"},
        {"mode": "min", "save_top_k": 1},
        {"max_to_keep": 3, "save_top_k": 3},
        {"max_to_keep": 3, "monitor": "loss"},
        {"max_to_keep": 3, "save_last": True},
        {"max_to_keep": 3, "keep": keep.latest(3)},
        {"save_last": True, "keep": keep.latest(3)},
    ],
)
def test_contradictions_are_one_error_that_says_what_the_names_mean(place: Path, given: dict[str, object]) -> None:
    with pytest.raises(PolicyConflict) as caught:
        tenuto.Checkpointer(place, state(), **given)  # type: ignore[arg-type]
    assert "save_top_k=k with monitor= keeps the k best" in str(caught.value)
    assert not place.exists()


@pytest.mark.parametrize(
    "given",
    [
        {"save_top_k": -2},
        {"save_top_k": "3", "monitor": "loss"},
        {"save_top_k": True},
        {"save_last": "link"},
        {"monitor": ""},
        {"monitor": "loss", "mode": "auto"},
        {"max_to_keep": 0},
    ],
)
def test_values_that_make_no_sense_are_refused(place: Path, given: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        tenuto.Checkpointer(place, state(), **given)  # type: ignore[arg-type]
    assert not place.exists()


def test_the_best_k_are_saved_when_they_come_and_kept(place: Path) -> None:
    losses = [5.0, 4.0, 6.0, 4.5, 9.0, 3.0]
    with tenuto.Checkpointer(place, state(), monitor="val_loss", save_top_k=2) as ckpt:
        for step in ckpt.steps(6):
            ckpt.log(val_loss=losses[step])
            ckpt.wait(60)
    assert steps_of(place) == [6, 2]


def test_save_given_beside_monitor_alone_says_when(place: Path) -> None:
    with tenuto.Checkpointer(place, state(), save=every(steps=2), monitor="val_loss", save_top_k=1) as ckpt:
        for step in ckpt.steps(4):
            ckpt.log(val_loss=[1.0, 5.0, 2.0, 6.0][step])
    assert steps_of(place) == [4, 2]
