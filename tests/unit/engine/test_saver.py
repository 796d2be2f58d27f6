"""How a save ends, whatever happens in its thread."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tenuto
from tenuto.engine.save import commit_protocol as engine_party
from tenuto.engine.save import save_writer as engine_writing
from tenuto.engine.save.handle import Save
from tenuto.engine.save.job import ManifestDetails
from tenuto.engine.save.saver import Saver
from tenuto.engine.staging.capture import Capturer
from tenuto.errors import SaveFailed, StoreError, StoreFull
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Manifest
from tenuto.repo.ownership.claim import claim
from tenuto.repo.repository import Repo
from tenuto.state.encode.flattener import flatten
from tenuto.store.memory import MemoryStore


@pytest.fixture
def saver() -> Saver:
    repo = Repo.create_or_open(MemoryStore("engine-saver"))
    found = Saver(repo, "main")
    found.attempt = claim(repo, "main", None)
    return found


def test_i8_a_save_ends_even_when_its_failure_cannot_be_handled(saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object, **__: object) -> None:
        raise MemoryError

    raised = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda told: raised.set())
    monkeypatch.setattr(engine_writing, "put_index", out_of_memory)
    monkeypatch.setattr(engine_writing, "abort", out_of_memory)
    handle = saver.save(flatten({"w": np.zeros(4)}), 1, wait=True, about=ManifestDetails())
    assert handle.done
    with pytest.raises(SaveFailed, match="was cut off while"):
        handle.wait(0)
    saver.attempt.release()
    assert raised.wait(60)  # the save has ended before: the error must not come up in another test


def test_a_commit_whose_answer_was_lost_is_found_to_have_arrived(saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = engine_party.commit

    def answered_by_an_error(*given: object, **named: object) -> None:
        whole(*given, **named)
        raise StoreError("no answer")

    monkeypatch.setattr(engine_party, "commit", answered_by_an_error)
    handle = saver.save(flatten({"w": np.zeros(4)}), 2, wait=True, about=ManifestDetails())
    assert handle.wait(0).step == 2
    assert saver.repo.exists(handle.id)
    saver.attempt.release()


def test_i7_room_is_not_made_by_the_manifest_of_the_very_save_that_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk may refuse to flush a manifest that can be seen: the checkpoint before is all there is then."""
    whole, seen = engine_party.commit, []

    def full_once(repo: Repo, manifest: Manifest, *given: object, **named: object) -> object:
        if manifest.id.step < 2:
            return whole(repo, manifest, *given, **named)
        seen.append(repo.exists(replace(manifest.id, step=1)))
        committed = whole(repo, manifest, *given, **named)
        if len(seen) == 1:
            raise StoreFull("no room for the flush")
        return committed

    monkeypatch.setattr(engine_party, "commit", full_once)
    with tenuto.Checkpointer(tmp_path, {"w": np.zeros(4)}, keep=tenuto.keep.latest(1)) as checkpointer:
        for _ in range(2):
            checkpointer.step_done()
            checkpointer.save().join()
            checkpointer.wait()
    assert seen and all(seen)


@pytest.mark.parametrize("error", [None, SaveFailed("no")])
def test_a_thread_that_is_late_to_say_how_far_a_save_is_does_not_undo_its_end(error: SaveFailed | None) -> None:
    handle = Save(CheckpointId("main", 1, 1), "0" * 32)
    handle.state = "capturing"
    handle.end(error)
    handle.state = "writing"
    assert (handle.state, handle.committed) == (("failed", False) if error else ("committed", True))


def test_a_save_that_is_waited_for_is_committed_when_its_writer_was_faster_than_the_capture(
    saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer may be done before the capturing thread comes to say that the image is whole."""
    whole, taken = Capturer.capture, []

    def slow_to_return(self: Capturer, *given: object, **named: object) -> None:
        whole(self, *given, **named)
        assert taken[0].join(60)

    monkeypatch.setattr(Capturer, "capture", slow_to_return)
    taken.append(saver.plan_save(1))
    handle = saver.save(flatten({"w": np.zeros(4)}), 1, wait=True, about=ManifestDetails(), handle=taken[0])
    assert handle.committed
    saver.attempt.release()
