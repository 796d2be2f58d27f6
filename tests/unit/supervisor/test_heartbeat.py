"""Beats: what a training process last did, as its supervisor reads it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from tenuto import Repository, every, keep, on
from tenuto.events import Event, SaveStarted
from tenuto.model.records import Receipt
from tenuto.store.local.store import LocalStore
from tenuto.telemetry import heartbeat, own_faults
from tenuto.telemetry.heartbeat import (
    ENDED,
    ENDING,
    STARTING,
    TRAINING,
    VARIABLE,
    Heartbeat,
    read_beats,
    read_places,
    read_run,
    request_save,
)  # fmt: skip


def test_the_last_beat_of_each_process_is_read(tmp_path: Path) -> None:
    first, second = Heartbeat(tmp_path, 0), Heartbeat(tmp_path, 1)
    began_s = time.monotonic()
    for step in range(1, 4):
        first.beat(step)
    second.beat(2, ENDING)
    found = sorted(read_beats(tmp_path), key=lambda beat: beat.rank)
    assert [(beat.rank, beat.step, beat.phase, beat.pid) for beat in found] == [
        (0, 3, TRAINING, os.getpid()),
        (1, 2, ENDING, os.getpid()),
    ]
    assert all(began_s <= beat.at_s <= time.monotonic() for beat in found)


def test_the_training_says_what_its_steps_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0]
    monkeypatch.setattr(time, "monotonic_ns", lambda: clock[0])
    beats = Heartbeat(tmp_path, 0, where="here", run="main")
    for step, after_s in ((0, 5), (1, 30), (2, 1), (3, 1), (4, 9), (5, 1)):
        clock[0] += after_s * 10**9
        beats.beat(step)
    (found,) = read_beats(tmp_path)
    assert (found.known, found.first_s, found.longest_s, found.usual_s) == (4, 30.0, 9.0, 1.0)
    beats.beat(5, ENDING)
    clock[0] += 100 * 10**9
    beats.beat(5), beats.beat(6)
    assert next(read_beats(tmp_path)).longest_s == 9.0, "what lay between was no step"
    assert next(read_beats(tmp_path)).of == found.of
    Heartbeat(tmp_path, 0, where="here", run="other")
    assert next(read_beats(tmp_path)).of != found.of


def test_half_a_beat_a_short_file_and_a_foreign_one_are_left_out(tmp_path: Path) -> None:
    Heartbeat(tmp_path, 0).beat(1)
    whole = next(tmp_path.iterdir())
    (tmp_path / "short.beat").write_bytes(whole.read_bytes()[:-1])
    (tmp_path / "foreign.beat").write_bytes(b"x" * whole.stat().st_size)
    half = bytearray(whole.read_bytes())
    half[-8:] = heartbeat._SEQUENCE.pack(-1)
    (tmp_path / "half.beat").write_bytes(half)
    assert [beat.step for beat in read_beats(tmp_path)] == [1]


def test_a_forked_child_does_not_beat_for_its_parent(tmp_path: Path) -> None:
    beats = Heartbeat(tmp_path, 0)
    beats.beat(7)
    pid = os.fork()
    if pid == 0:
        beats.beat(8)
        os._exit(0)
    os.waitpid(pid, 0)
    assert [beat.step for beat in read_beats(tmp_path)] == [7]


def test_a_directory_that_is_gone_stops_no_training(tmp_path: Path) -> None:
    Heartbeat(tmp_path / "gone", 0).beat(1)
    Heartbeat.from_environment(0, {}).beat(1)
    assert list(read_beats(tmp_path / "gone")) == []


def test_a_training_beats_at_each_step_and_says_when_it_ends(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "beats").mkdir()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "beats"))
    seen = []

    def now() -> tuple[int, str]:
        (beat,) = read_beats(tmp_path / "beats")
        return beat.step, beat.phase

    with tenuto.Checkpointer(tmp_path / "ck", {"w": np.zeros(3)}, log="silent") as ckpt:
        seen.append(now())
        seen += [now() for _ in ckpt.steps(3)]
        seen.append(now())
    seen.append(now())
    assert seen == [(0, STARTING), (0, TRAINING), (1, TRAINING), (2, TRAINING), (3, ENDING), (3, ENDED)]


def test_a_training_that_is_asked_saves_its_next_step_once_and_goes_on(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "beats").mkdir()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "beats"))
    began = {}

    class Began:
        def emit(self, event: Event) -> None:
            if isinstance(event, SaveStarted):
                began[event.id.step] = event.reason

    with tenuto.Checkpointer(
        tmp_path / "ck", {"w": np.zeros(3)}, save=on.end(), memory=every(steps=1), keep=keep.all(), log="silent",
        sinks=[Began()],
    ) as ckpt:  # fmt: skip
        for step in ckpt.steps(9):
            if step == 4:
                request_save(tmp_path / "beats", "memory: too early")
                request_save(tmp_path / "beats", "memory: 1 GiB left")
            if step == 6:
                while ckpt.stats.committed < 1:
                    time.sleep(0.01)
    assert began == {5: "memory: 1 GiB left", 9: "training ends"}
    assert [one.step for one in Repository(tmp_path / "ck").checkpoints()] == [9, 5]
    (beat,) = read_beats(tmp_path / "beats")
    assert (beat.saves, beat.sealed) == (2, 1) and beat.save_s > 0 and beat.save_bytes > 0
    assert read_run(tmp_path / "beats") == (str(tmp_path / "ck"), "main")
    assert read_places(tmp_path / "beats") == [str(tmp_path / "ck")]


def test_one_of_several_processes_gets_a_request(tmp_path: Path) -> None:
    first, second = Heartbeat(tmp_path, 0), Heartbeat(tmp_path, 1)
    assert first.save_request() is None
    request_save(tmp_path, "why")
    assert (second.save_request(), first.save_request(), second.save_request()) == ("why", None, None)
    request_save(tmp_path / "gone", "why")
    assert Heartbeat(None, 0).save_request() is None


def test_a_run_in_several_places_names_them_all(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "beats").mkdir()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "beats"))
    where = tenuto.Mirror(tmp_path / "a", tmp_path / "b")
    with tenuto.Checkpointer(where, {"w": np.zeros(3)}, log="silent") as ckpt:
        list(ckpt.steps(1))
    assert read_run(tmp_path / "beats") == (str(tmp_path / "a"), "main")
    assert read_places(tmp_path / "beats") == [str(tmp_path / "a"), str(tmp_path / "b")]


def test_a_beat_says_at_which_step_training_began_in_this_process(tmp_path: Path) -> None:
    beats = Heartbeat(tmp_path, 0)
    for step in (17, 18, 19):
        beats.beat(step)
    (beat,) = read_beats(tmp_path)
    assert (beat.step, beat.began) == (19, 17)


def test_a_request_waits_while_a_save_is_written_rather_than_being_skipped(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "beats").mkdir()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "beats"))
    written, whole = threading.Event(), LocalStore.put_if_absent

    def put(store: LocalStore, name: str, *content: Any, **more: Any) -> Receipt:
        if name.endswith(".safetensors"):
            written.wait()
        return whole(store, name, *content, **more)

    monkeypatch.setattr(LocalStore, "put_if_absent", put)
    with tenuto.Checkpointer(
        tmp_path / "ck", {"w": np.zeros(3)}, save=on.end(), on_busy="skip", keep=keep.all(), log="silent"
    ) as ckpt:
        for step in ckpt.steps(9):
            if step == 2:
                first = ckpt.save()
            if step == 3:
                request_save(tmp_path / "beats", "memory: 1 GiB left")
            if step == 6:
                written.set()
                first.wait()
    assert [one.step for one in Repository(tmp_path / "ck").checkpoints()][-2:] == [7, 3]


def test_a_fault_asked_for_strikes_no_training_that_has_come_to_its_end(tmp_path: Path) -> None:
    """One that hangs there would hang for ever: what a script does after it has saved has no limit."""
    beats = Heartbeat.from_environment(0, {VARIABLE: str(tmp_path), heartbeat.CHAOS: "1"})
    beats.beat(1)
    own_faults.ask(tmp_path, 0, os.getpid(), "oom", 1.0)
    beats.beat(2, ENDING)
    beats.beat(2, ENDED)
    with pytest.raises(MemoryError):
        beats.beat(3)


def test_a_place_whose_name_is_no_text_is_named_as_it_is(tmp_path: Path) -> None:
    where = os.fsdecode(os.fsencode(tmp_path) + b"/ck\xff")
    beats = Heartbeat(tmp_path, 0, where=where, run="main")
    assert read_run(tmp_path) == (where, "main") and read_places(tmp_path) == [where]
    request_save(tmp_path, f"disk-filling: {where} has 1 GiB free")
    assert beats.save_request() == f"disk-filling: {where} has 1 GiB free"
