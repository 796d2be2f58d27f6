"""Copies made by processes of their own: killed in the middle, several at once, beside a training, stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import tenuto
from tenuto.maintenance.verify import assert_whole
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

LEAF = 1_500_000
KILLED_IN_A_PUT = """
import os, signal, sys, tenuto
from tenuto.events import Progress
def die(event):
    if isinstance(event, Progress) and event.phase == "replicate":
        os.kill(os.getpid(), signal.SIGKILL)
tenuto.Repository(sys.argv[1], sinks=[die]).replicate(sys.argv[2])
"""
KILLED_BEFORE_THE_MANIFEST = """
import os, signal, sys, tenuto
from tenuto.crashpoints import armed
with armed("packs copied, checkpoint not looked for again", lambda: os.kill(os.getpid(), signal.SIGKILL)):
    tenuto.Repository(sys.argv[1]).replicate(sys.argv[2])
"""
TRAINS = """
import sys, numpy as np, tenuto
state = {"w": np.zeros(200_000)}
with tenuto.Checkpointer(sys.argv[1], state, save=tenuto.every(steps=1), keep=tenuto.keep.latest(2)) as ckpt:
    for step in ckpt.steps(40):
        state["w"] += 1
"""


def program(text: str, *words: object) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", text, *map(str, words)], text=True)


def command(*words: object) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "tenuto", *map(str, words)]
    return subprocess.Popen(line, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def saved(where: Path) -> None:
    for value in range(3):
        tenuto.save({"w": np.full(LEAF, float(value))}, where)


def until(what: Callable[[], bool], seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


def test_killed_in_the_middle_it_goes_on_and_cleans_up(tmp_path: Path) -> None:
    source, to = tmp_path / "source", tmp_path / "copy"
    saved(source)
    for text in (KILLED_IN_A_PUT, KILLED_BEFORE_THE_MANIFEST):
        assert program(text, source, to).wait(120) == -signal.SIGKILL
        assert tenuto.Repository(to).checkpoints() == []
    # The second one removed what the first had left of its put, and left a whole data file.
    assert not list(to.rglob("*.tmp-*"))
    report = tenuto.Repository(source).replicate(to)
    assert [id.step for id in report.copied] == [2, 1, 0] and report.ok
    assert report.bytes < 2.5 * LEAF * 8, "the newest one's data file is not copied again"
    assert_whole(Repo.open(open_store(to)))
    assert (tenuto.load(to).state["w"] == 2).all()


def test_several_at_once_come_to_one_copy(tmp_path: Path) -> None:
    source, to = tmp_path / "source", tmp_path / "copy"
    saved(source)
    running = [command("replicate", source, to) for _ in range(3)]
    for one in running:
        _, err = one.communicate(timeout=120)
        assert one.returncode == 0, err
    assert tenuto.Repository(source).check_copy(to, read=True).exit_code == 0
    assert not list(to.rglob("*.tmp-*"))
    assert_whole(Repo.open(open_store(to)))


def test_following_a_training_that_removes_what_is_copied(tmp_path: Path) -> None:
    """At the end the copy is in step, and everything in it is whole, whatever was removed in between."""
    source, to = tmp_path / "source", tmp_path / "copy"
    tenuto.save({"w": np.zeros(200_000)}, source)
    following = command("replicate", source, to, "--follow", "--every", "0.01s", "--prune")
    try:
        training = program(TRAINS, source)
        assert training.wait(180) == 0
        newest = tenuto.Repository(source).latest()
        until(lambda: (to / "tenuto.json").exists() and tenuto.Repository(to).latest() == newest)
    finally:
        following.send_signal(signal.SIGTERM)
        out, err = following.communicate(timeout=60)
    assert following.returncode == 0, err
    assert re.search(r"^main/a0\S+: 1 checkpoint, .*; (in step|\d+ behind)$", err, re.M), err
    assert "error" not in err and out.splitlines()[0].split()[0] == "COPIED"
    assert tenuto.Repository(source).replicate(to).ok
    assert tenuto.Repository(source).check_copy(to, read=True).exit_code == 0
    assert_whole(Repo.open(open_store(to)))
    assert (tenuto.load(to).state["w"] == 40).all()


def test_following_ends_in_the_middle_of_a_data_file(tmp_path: Path) -> None:
    source, to = tmp_path / "source", tmp_path / "copy"
    saved(source)
    following = command("replicate", source, to, "--follow")
    until(lambda: bool(list(to.rglob("*.tmp-*"))) or (to / "runs").exists())
    following.send_signal(signal.SIGINT)
    _, err = following.communicate(timeout=60)
    assert following.returncode == 0, err
    assert not list(to.rglob("*.tmp-*"))
    assert tenuto.Repository(source).replicate(to).ok
    assert_whole(Repo.open(open_store(to)))


def test_a_source_that_is_away_for_a_while_does_not_end_it(tmp_path: Path) -> None:
    source, to, away = tmp_path / "source", tmp_path / "copy", tmp_path / "away"
    saved(source)
    following = command("replicate", source, to, "--follow", "--every", "0.05s")
    try:
        until(lambda: (to / "tenuto.json").exists() and len(tenuto.Repository(to).checkpoints()) == 3)
        os.rename(source, away)
        assert following.stderr is not None
        for line in following.stderr:
            if "is not there now; asking again in" in line:
                break
        os.rename(away, source)
        tenuto.save({"w": np.full(LEAF, 9.0)}, source)
        until(lambda: len(tenuto.Repository(to).checkpoints()) == 4)
    finally:
        following.terminate()
        following.communicate(timeout=60)
    assert following.returncode == 0
