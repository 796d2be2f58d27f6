"""The trainings into which signals are delivered: a few steps each, every one with another way through a save.

Each keeps `w[0] == n == steps` in its state at the end of every body, so a checkpoint that has a part of a step shows.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np

import tenuto
from tenuto import every, keep, on
from tenuto.policy.save import SavePolicy

FIELDS: Final = ("begun", "done", "counted", "delivered", "begun_then", "done_then", "watched_then")


class Report:
    """What a training that may be ended at any line has told of itself: numbers in memory that outlive it."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * len(FIELDS))

    def __getitem__(self, name: str) -> int:
        return int(struct.unpack_from("q", self._memory, 8 * FIELDS.index(name))[0])

    def __setitem__(self, name: str, value: int) -> None:
        struct.pack_into("q", self._memory, 8 * FIELDS.index(name), value)

    def close(self) -> None:
        self._memory.close()


State = dict[str, Any]


@dataclass(frozen=True)
class Training:
    """One training. `resumes`: it begins with what an earlier process has saved, and restores that."""

    name: str
    run: Callable[[Path, Report, SavePolicy | None], None]
    resumes: bool = False


def state() -> State:
    return {"w": np.zeros(512, np.float32), "n": 0}


@contextmanager
def body(one: State, report: Report) -> Iterator[None]:
    """One step."""
    report["begun"] += 1
    one["w"] += 1
    yield
    one["n"] += 1
    report["done"] += 1


def policy(usual: SavePolicy, leaving: SavePolicy | None) -> SavePolicy:
    return usual if leaving is None else usual | leaving


@contextmanager
def checkpointer(where: Path, one: State, report: Report, **more: Any) -> Iterator[tenuto.Checkpointer]:
    """A Checkpointer whose count is reported, however its training ends."""
    with tenuto.Checkpointer(where, one, keep=keep.latest(2), **more) as ckpt:
        try:
            yield ckpt
        finally:
            report["counted"] = ckpt.step
    report["counted"] = ckpt.step


def own_loop(where: Path, report: Report, leaving: SavePolicy | None, **more: Any) -> None:
    one = state()
    with checkpointer(where, one, report, save=policy(every(steps=2) | on.end(), leaving), **more) as ckpt:
        ckpt.restore()
        for _ in range(3):
            with body(one, report):
                pass
            ckpt.step_done()


def in_flight(where: Path, report: Report, leaving: SavePolicy | None) -> None:
    own_loop(where, report, leaving, in_flight=2)


def in_memory(where: Path, report: Report, leaving: SavePolicy | None) -> None:
    own_loop(where, report, leaving, memory=every(steps=1))


def encoded(where: Path, report: Report, leaving: SavePolicy | None) -> None:
    own_loop(where, report, leaving, encoding="small")


def counted(where: Path, report: Report, leaving: SavePolicy | None) -> None:
    one = state()
    with checkpointer(where, one, report, save=policy(every(steps=1), leaving)) as ckpt:
        for step in ckpt.steps(3):
            with body(one, report):
                if step == 1:
                    ckpt.log(loss=0.5, tag="named")
        ckpt.log(after=1.0)
        ckpt.log(again=1.0, tag="last")


def awaited(where: Path, report: Report, leaving: SavePolicy | None) -> None:
    one = state()
    with checkpointer(where, one, report, save=policy(on.end(), leaving)) as ckpt:
        ckpt.restore()
        for _ in range(2):
            with body(one, report):
                pass
            ckpt.step_done()
            ckpt.save(wait=True)
        ckpt.wait()


def epochs(where: Path, report: Report, leaving: SavePolicy | None) -> None:
    one = state()
    usual = on.improve("val_loss") | on.end()
    with checkpointer(where, one, report, data=[1, 2], save=policy(usual, leaving)) as ckpt:
        for epoch in ckpt.epochs(2):
            for _ in ckpt.batches:
                with body(one, report):
                    ckpt.log(loss=1.0)
            ckpt.log(val_loss=1.0 - epoch)
    with checkpointer(where, one, report, save=policy(every(steps=1), leaving)) as ckpt:
        ckpt.restore()


def late_metrics(where: Path, report: Report, leaving: SavePolicy | None) -> None:
    one = state()
    with checkpointer(where, one, report, save=policy(on.improve("val_loss"), leaving)) as ckpt:
        ckpt.restore()
        for step in range(2):
            with body(one, report):
                pass
            ckpt.step_done()
            ckpt.log(val_loss=1.0 - step)
            ckpt.log(tag="named", again=1.0)


def fenced(where: Path, report: Report, leaving: SavePolicy | None) -> None:
    import torch

    from tenuto.state import update_barrier

    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    one = {**state(), "model": model, "optimizer": optimizer}

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()

    usual = policy(every(steps=1), leaving)
    with mock.patch.object(update_barrier, "LEAST_BYTES", 1), mock.patch.object(update_barrier, "PROBATION", 1):
        with checkpointer(where, one, report, save=usual, capture="fenced", data=[1, 2]) as ckpt:
            for _ in ckpt.epochs(2):
                for _ in ckpt.batches:
                    with body(one, report):
                        step()
                ckpt.fence()


TRAININGS: Final = (
    Training("own loop", own_loop),
    Training("two in flight", in_flight),
    Training("memory", in_memory),
    Training("encoded", encoded),
    Training("counted", counted),
    Training("awaited", awaited),
    Training("epochs", epochs),
    Training("late metrics", late_metrics),
    Training("fenced", fenced),
    Training("resumed", own_loop, resumes=True),
    Training("resumed encoded", encoded, resumes=True),
    Training("resumed from memory", in_memory, resumes=True),
)


def by_name(name: str) -> Training:
    return next(one for one in TRAININGS if one.name == name)
