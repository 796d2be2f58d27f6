"""Images in memory that were copied behind a fence, against eager ones, over random trainings: equal in every bit."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings

from property.test_fenced_images import GROWING, SCALED, STEPS, TIED, Training, in_a_new_place, trainings
from support.fenced_training import Told, owned, train
from support.memory_training import shared_memory
from tenuto import every
from tenuto.engine.memory_tier.tier import MemoryTier
from tenuto.engine.save.job import Job
from tenuto.events import SavedToMemory

Leaves = dict[str, bytes]


def images(place: Path, drawn: dict[str, Any], capture: str) -> tuple[dict[int, Leaves], Told]:
    """Step -> the bytes of every leaf in the image that was sealed for it."""
    found: dict[int, Leaves] = {}
    seal = MemoryTier.seal

    def seen(self: MemoryTier, job: Job) -> str:
        layout, image = job.plan.layout, np.frombuffer(job.plan.arena.buffer.data, np.uint8)
        extents = zip(job.flattened.specs, layout.start.tolist(), layout.length.tolist(), strict=True)
        leaves = {spec.path: image[start : start + length].tobytes() for spec, start, length in extents}
        found[job.save.step] = leaves
        return seal(self, job)

    training, told = Training(drawn), Told()

    def body(step: int) -> None:
        training.step(step)
        until = time.monotonic() + 60
        while step and step not in found and time.monotonic() < until:
            time.sleep(0.002)  # or the image of the next step may be skipped

    with shared_memory(), mock.patch.object(MemoryTier, "seal", seen):
        options = {"save": every(steps=1000), "memory": every(steps=1), "capture": capture}
        train(place, training.state, body, steps=STEPS, told=told, **options)
    sealed = [event.id.step for event in told.events if isinstance(event, SavedToMemory)]
    # Told once a slot is sealed and the next one may be: another thread's word may come first.
    assert sorted(sealed) == sorted(found) == list(range(1, STEPS + 1))
    return found, told


@example(SCALED)
@example(TIED)
@example(GROWING)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(trainings)
@pytest.mark.filterwarnings("ignore")
def test_an_image_in_memory_is_the_same_fenced_or_eager(drawn: dict[str, Any]) -> None:
    def check(place: Path) -> None:
        eager, _ = images(place / "eager", drawn, "eager")
        fenced, told = images(place / "fenced", drawn, "fenced")
        assert not told.demoted
        for step, leaves in eager.items():
            assert leaves.keys() == fenced[step].keys()
            differing = [path for path, bits in leaves.items() if fenced[step][path] != bits]
            assert not differing, f"step {step}, late {sorted(owned(told))[:5]}"

    in_a_new_place(check)
