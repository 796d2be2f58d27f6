"""Events that come piece by piece are made for those who listen, and for nobody else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.saves_of_ranks import save_jointly
from tenuto.engine.read import leaf_reader, sharded_reader
from tenuto.engine.save import save_writer
from tenuto.errors import TenutoWarning
from tenuto.events import Emitter, Event, Progress, Sink
from tenuto.maintenance import verify
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

Act = Callable[[Path, Sequence[Sink]], object]


class Recorded:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


class Broken:
    def emit(self, event: Event) -> None:
        raise ValueError


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Progress]:
    found: list[Progress] = []

    def make(*words: Any) -> Progress:
        found.append(Progress(*words))
        return found[-1]

    for module in (save_writer, leaf_reader, sharded_reader, verify):
        monkeypatch.setattr(module, "Progress", make)
    return found


def saved(place: Path, sinks: Sequence[Sink]) -> None:
    tenuto.save({"w": np.ones(1000)}, place, sinks=sinks)


def loaded(place: Path, sinks: Sequence[Sink]) -> None:
    tenuto.load(place, into={"w": np.zeros(1000)}, run="alone", sinks=sinks)


def joined(place: Path, sinks: Sequence[Sink]) -> None:
    tenuto.load(place, run="ranks", sinks=sinks)


def verified(place: Path, sinks: Sequence[Sink]) -> None:
    repo = tenuto.Repository(place).repo
    assert verify.execute(repo, verify.plan_verify(repo), emitter=Emitter.of(sinks)).ok


@pytest.mark.parametrize("act", [saved, loaded, joined, verified])
def test_no_progress_is_made_that_nobody_takes(place: Path, made: list[Progress], act: Act) -> None:
    tenuto.save({"w": np.ones(1000)}, place, run="alone")
    save_jointly(Repo.open(open_store(place)), 3, (1,), "ranks")
    assert not made
    act(place, ())
    assert not made
    sink = Recorded()
    act(place, [sink])
    told = [event for event in sink.events if isinstance(event, Progress)]
    assert told and told == made, "and who listens is told all of it"


def test_a_sink_that_was_dropped_listens_no_more() -> None:
    emitter = Emitter.of([Broken()])
    assert emitter.listened
    with pytest.warns(TenutoWarning, match="no longer used"):
        emitter.emit(Progress("save", "main/a0001/1", 1, 2))
    assert not emitter.listened and not Emitter().listened
