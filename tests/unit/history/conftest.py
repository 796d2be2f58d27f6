"""Runs in memory, trained, rolled back and forked without threads or clocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

import tenuto
from tenuto.engine.save.job import ManifestDetails
from tenuto.engine.save.saver import Saver
from tenuto.repo.lineage import latest
from tenuto.repo.ownership.claim import claim
from tenuto.state.encode.flattener import flatten

_names = itertools.count()
Train = Callable[..., None]


@pytest.fixture
def where() -> str:
    return f"memory://history-{next(_names)}"


@pytest.fixture
def train(where: str) -> Train:
    return trainer(where)


@pytest.fixture
def another() -> Callable[[], tuple[tenuto.Repository, Train]]:
    """Returns a new repository, and what trains in it, at each call."""

    def make() -> tuple[tenuto.Repository, Train]:
        where = f"memory://history-{next(_names)}"
        train = trainer(where)
        return tenuto.Repository(where), train

    return make


def trainer(where: str) -> Train:
    """Returns what saves steps of a run by one more attempt, which resumes from what `latest` means."""
    tenuto.save({"x": 0}, where, run="unused")

    def run(
        steps: Sequence[int],
        run: str = "main",
        *,
        loss: Callable[[int], float] = lambda step: 1 / step,
        state: Callable[[int], object] = lambda step: {"x": np.full(3, step, np.float32), "lr": 0.1},
        modes: dict[str, str] | None = None,
    ) -> None:
        repo = tenuto.Repository(where).repo
        parent = latest(repo, run)
        attempt = claim(repo, run, parent)
        saver = Saver(repo, run)
        saver.attempt = attempt
        for step in steps:
            certificate = {"modes": modes} if modes else {}
            about = ManifestDetails(parent, {"loss": loss(step)}, {"step": step}, {"numpy": "2"}, certificate)
            saver.save(flatten(state(step)), step, wait=True, about=about).wait()
        attempt.release()
        saver.close()

    return run


@pytest.fixture
def repository(where: str, train: Train) -> tenuto.Repository:
    return tenuto.Repository(where)
