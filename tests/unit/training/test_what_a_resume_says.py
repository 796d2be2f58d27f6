"""The line of a resume has the reason why it is not exact: looked at when it was saved, or when it is resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import tenuto
from tenuto import every
from tenuto.events import Resumed
from tenuto.torch import Gradients

STEPS = 13
WINDOW = 5


class Job:
    """A training of a few steps that ends between two saves of every step."""

    def __init__(self, where: Path, *, gradients: bool = False) -> None:
        torch.manual_seed(0)
        self.where = where
        self.said: list[str] = []
        """The verdicts in words, as the line of each resume has them."""
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        if gradients:
            self.state["gradients"] = Gradients(self.model)

    def hear(self, event: Any) -> None:
        if isinstance(event, Resumed):
            self.said.append(event.verdict)

    def train(
        self,
        steps: int,
        step: Callable[[Job, int], None],
        *,
        before: Callable[[Job], None] | None = None,
        strict: bool = True,
    ) -> tenuto.Restored | None:
        if before is not None:
            before(self)
        with tenuto.Checkpointer(
            self.where, self.state, data=[0] * 100, save=every(steps=1), sinks=[self.hear]
        ) as ckpt:
            restored = ckpt.restore(strict=strict)
            for number in ckpt.steps(steps):
                next(ckpt.batches)
                step(self, number)
        return restored

    def backward(self) -> None:
        mse_loss(self.model(torch.randn(6, 4)), torch.zeros(6, 1)).backward()


def plain(job: Job, number: int) -> None:
    job.optimizer.zero_grad()
    job.backward()
    job.optimizer.step()


def accumulating(job: Job, number: int) -> None:
    job.backward()
    if (number + 1) % WINDOW == 0:
        job.optimizer.step()
        job.optimizer.zero_grad()


def clearing_in_place(job: Job, number: int) -> None:
    job.backward()
    job.optimizer.step()
    job.optimizer.zero_grad(set_to_none=False)


def clipping_weights(job: Job, number: int) -> None:
    plain(job, number)
    with torch.no_grad():
        for one in job.model.parameters():
            one.clamp_(-0.5, 0.5)


def swapping_at_the_end(job: Job, number: int) -> None:
    plain(job, number)
    if number == STEPS - 1:
        with torch.no_grad():
            for one in job.model.parameters():
                one.mul_(0.9)


def resumed(where: Path, step: Callable[[Job, int], None], **options: Any) -> tuple[tenuto.Restored, str]:
    """Returns what a second process restores, and what its line says."""
    Job(where).train(STEPS, step)
    job = Job(where)
    found = job.train(STEPS, step, **options)
    assert found is not None
    return found, job.said[0]


@pytest.mark.parametrize("step", [plain, clearing_in_place, clipping_weights])
def test_what_hides_nothing_has_no_known_gap(tmp_path: Path, step: Any) -> None:
    found, said = resumed(tmp_path, step)
    assert (found.verdict, found.certificate["reasons"], found.certificate["caveats"]) == ("no known gap", [], [])
    assert said == "no known gap"


def test_gradients_of_an_open_window_are_told(tmp_path: Path) -> None:
    found, said = resumed(tmp_path, accumulating)
    assert found.verdict == "not exact"
    assert said.startswith("not exact: optimizer: gradients lie there that no step has used yet")


def test_between_two_windows_nothing_is_open(tmp_path: Path) -> None:
    Job(tmp_path).train(2 * WINDOW, accumulating)
    found = Job(tmp_path).train(2 * WINDOW, accumulating)
    assert found is not None and found.verdict == "no known gap"


def test_saved_gradients_are_added_to(tmp_path: Path) -> None:
    whole = Job(tmp_path / "whole", gradients=True)
    whole.train(2 * WINDOW, accumulating)
    Job(tmp_path / "pieces", gradients=True).train(WINDOW + 3, accumulating)
    again = Job(tmp_path / "pieces", gradients=True)
    found = again.train(2 * WINDOW, accumulating)
    assert found is not None and found.verdict == "no known gap"
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_weights_swapped_in_behind_a_step_are_told(tmp_path: Path) -> None:
    _, said = resumed(tmp_path, swapping_at_the_end)
    assert said.startswith("not exact: optimizer: its weights were changed since its latest step")


def evaluating(job: Job) -> None:
    job.model[1].eval()


def freezing(job: Job) -> None:
    job.model[0].weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("before", "words"),
    [(evaluating, "model/1 is in eval mode"), (freezing, "model/0.weight is frozen")],
)
def test_modes_and_frozen_parameters_are_compared(tmp_path: Path, before: Any, words: str) -> None:
    found, _ = resumed(tmp_path / "a", plain, before=before)
    assert [reason for reason in found.certificate["reasons"] if words in reason]
    job = Job(tmp_path / "b")
    job.train(STEPS, plain, before=before)
    again = Job(tmp_path / "b").train(STEPS, plain, before=before)
    assert again is not None and again.verdict == "no known gap"


def test_what_a_partial_restore_leaves_out_is_in_the_verdict(tmp_path: Path) -> None:
    Job(tmp_path).train(STEPS, plain)
    job = Job(tmp_path)
    job.state["other"] = job.state.pop("optimizer")
    found = job.train(STEPS, plain, strict=False)
    assert found is not None and found.verdict == "not exact"
    assert job.said[0].startswith("not exact: ") and "(strict=False)" in job.said[0]


def test_a_data_position_that_does_not_fit_is_in_the_line(tmp_path: Path) -> None:
    Job(tmp_path).train(STEPS, plain)
    job = Job(tmp_path)
    with (
        pytest.warns(tenuto.TenutoWarning, match="the data has 90 batches"),
        tenuto.Checkpointer(tmp_path, job.state, data=[0] * 90, save=every(steps=1), sinks=[job.hear]) as ckpt,
    ):
        assert ckpt.restore().verdict == "not exact"
        for _ in ckpt.steps(STEPS):
            pass
    assert job.said[0].startswith("not exact: the data has 90 batches")


@pytest.mark.parametrize("shared", [False, True])
def test_a_second_loader_that_the_loop_iterates_itself_is_told(tmp_path: Path, shared: bool) -> None:
    rows = list(range(60))
    for _ in range(2):
        job = Job(tmp_path)
        loader = DataLoader(rows, batch_size=4, shuffle=True)
        other = DataLoader(rows if shared else list(range(60)), batch_size=4, shuffle=True)
        with tenuto.Checkpointer(tmp_path, job.state, data=loader, save=every(steps=1), sinks=[job.hear]) as ckpt:
            seconds = iter(other)
            for number in ckpt.steps(9 if job.said else 6):
                next(ckpt.batches), next(seconds)
                plain(job, number)
    assert job.said[0].startswith("not exact: training is in the middle of a DataLoader over list too")


def test_a_validation_loader_hides_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        job = Job(tmp_path)
        loader, validation = DataLoader(list(range(60)), batch_size=4), DataLoader(list(range(20)), batch_size=4)
        with tenuto.Checkpointer(tmp_path, job.state, data=loader, save=every(steps=1), sinks=[job.hear]) as ckpt:
            for number in ckpt.steps(6):
                next(ckpt.batches)
                plain(job, number)
                assert len(list(validation)) == 5
    assert job.said == ["no known gap"]


def test_gradients_that_are_saved_as_tensors_are_no_gap(tmp_path: Path) -> None:
    for _ in range(2):
        job = Job(tmp_path)
        for one in job.model.parameters():
            one.grad = torch.zeros_like(one)
        job.state["kept"] = [one.grad for one in job.model.parameters()]

        def step(job: Job, number: int) -> None:
            job.backward()
            if (number + 1) % WINDOW == 0:
                job.optimizer.step()
                job.optimizer.zero_grad(set_to_none=False)

        job.train(STEPS, step)
    assert job.said == ["no known gap"]
