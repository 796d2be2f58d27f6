"""Which parts a save has, and that they are told to whoever asks: the handle, the event, the manifest."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from tenuto.engine.save import save_writer as engine_writing
from tenuto.engine.save.job import ManifestDetails
from tenuto.engine.save.saver import Saver
from tenuto.errors import SaveFailed, StoreError
from tenuto.events import Committed, Emitter, Event, PackWritten
from tenuto.model.timing import Timing
from tenuto.repo.ownership.claim import claim
from tenuto.repo.repository import Repo
from tenuto.state.encode.flattener import flatten
from tenuto.store.memory import MemoryStore

STATE = {"w": np.zeros(300_000)}


class Recorded:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


@pytest.fixture
def sink() -> Recorded:
    return Recorded()


def saver_of(sink: Recorded, **options: bool) -> Iterator[Saver]:
    repo = Repo.create_or_open(MemoryStore("engine-timing"))
    saver = Saver(repo, "main", emitter=Emitter.of([sink]), lasting=False, **options)
    saver.attempt = claim(repo, "main", None)
    yield saver
    saver.attempt.release()
    saver.close()


@pytest.fixture
def saver(sink: Recorded) -> Iterator[Saver]:
    yield from saver_of(sink, timed=True)


@pytest.fixture
def untimed(sink: Recorded) -> Iterator[Saver]:
    yield from saver_of(sink)


@pytest.mark.parametrize("wait", [False, True])
def test_every_part_of_a_save_is_told_and_no_other(saver: Saver, sink: Recorded, wait: bool) -> None:
    handle = saver.save(flatten(STATE), 1, wait=wait, about=ManifestDetails())
    handle.wait(60)
    assert saver.join(60)
    timing = handle.timing
    parts = ["prepare_s", "capture_s", "begin_s", "digest_s", "write_s", "index_s", "commit_s", "cpu_s", "seconds"]
    assert all(getattr(timing, part) > 0 for part in parts)
    assert (timing.join_s > 0) == wait
    assert timing.look_s == timing.wait_s == timing.fence_s == timing.seal_s == 0
    assert timing.bytes == handle.bytes
    beside = timing.begin_s + timing.write_s + timing.index_s + timing.commit_s
    assert beside <= timing.seconds, "the writing thread does one thing at a time"
    assert timing.held_s <= handle.stall_s + 1e-9
    (committed,) = [event for event in sink.events if isinstance(event, Committed)]
    before = {"join_s": 0.0} if wait else {}  # the event comes before whoever waits goes on
    assert (committed.timing.write_s, committed.timing.seconds) == (timing.write_s, timing.seconds)
    assert committed.timing.to_json() | before == timing.to_json() | before


def test_digests_made_while_writing_are_not_the_writing(saver: Saver, sink: Recorded) -> None:
    handle = saver.save(flatten(STATE), 1, wait=False, about=ManifestDetails())
    handle.wait(60)
    puts = sum(event.seconds for event in sink.events if isinstance(event, PackWritten))
    assert handle.timing.write_s + handle.timing.digest_s <= puts


def test_the_manifest_says_what_was_known_before_it_was_put(saver: Saver) -> None:
    about = ManifestDetails(environment={"python": "3.11"})
    handle = saver.save(flatten(STATE), 1, wait=True, about=about)
    found = saver.repo.manifest(handle.wait(60)).environment
    assert found["python"] == "3.11"
    timing = Timing.read(found["timing"], handle.bytes)
    assert timing is not None
    assert timing.write_s == round(handle.timing.write_s, 6)
    assert timing.capture_s > 0
    assert timing.commit_s == timing.seconds == 0
    assert about.environment == {"python": "3.11"}, "it is every save's"


def test_nothing_is_said_unless_it_is_wanted(untimed: Saver) -> None:
    handle = untimed.save(flatten(STATE), 1, wait=True, about=ManifestDetails())
    assert "timing" not in untimed.repo.manifest(handle.wait(60)).environment


def test_a_save_that_failed_tells_how_far_it_came(saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise StoreError("no index today")

    monkeypatch.setattr(engine_writing, "put_index", fails)
    handle = saver.save(flatten(STATE), 1, wait=False, about=ManifestDetails())
    with pytest.raises(SaveFailed):
        handle.wait(60)
    assert handle.timing.write_s > 0
    assert handle.timing.commit_s == handle.timing.seconds == 0


def test_measuring_reads_the_clock_as_often_for_many_leaves_as_for_few(
    saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = [0]
    read = time.perf_counter

    def counted() -> float:
        readings[0] += 1
        return read()

    def readings_of(leaves: int, step: int) -> int:
        flattened = flatten({str(number): np.zeros(10) for number in range(leaves)})
        before = readings[0]
        saver.save(flattened, step, wait=False, about=ManifestDetails()).wait(60)
        assert saver.join(60)
        return readings[0] - before

    saver.prewarm(flatten(STATE))
    monkeypatch.setattr(time, "perf_counter", counted)
    few = readings_of(10, 1)
    assert 0 < readings_of(2000, 2) == few < 50
