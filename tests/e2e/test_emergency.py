"""What is left of a training that ends in trouble: by an error, by a signal without time to save, a full disk."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import tenuto
from support.supervised import await_that, finished, started

TRAIN = """
import errno, os, pathlib, sys, time, numpy as np, tenuto
from tenuto import every, on
from tenuto.crashpoints import armed
from tenuto.store.local.store import LocalStore
state = {"w": np.zeros(1000)}
def sealed(steps):
    while ckpt.stats.kept_in_memory < steps:
        time.sleep(0.01)
"""


def test_an_error_leaves_the_newest_sealed_state_in_the_store(tmp_path: Path) -> None:
    script = """
with tenuto.Checkpointer("ckpts", state, save=every(steps=1000), memory=every(steps=1)) as ckpt:
    for step in ckpt.steps(20):
        state["w"] += 1
        if step == 7:
            sealed(7)
            raise ValueError("bad data")
"""
    done = finished(tmp_path, TRAIN + script, "--restarts", "0")
    assert done.returncode == 1 and "ValueError: bad data" in done.stderr
    assert "tenuto: saved from memory: main/a0002/7" in done.stderr
    assert tenuto.load(tmp_path / "ckpts").state["w"][0] == 7


def test_a_signal_whose_grace_ends_within_a_save_leaves_the_newest_sealed_state(tmp_path: Path) -> None:
    script = """
with armed("begun, nothing written", lambda: time.sleep(1000)):  # a store that no longer answers
    with tenuto.Checkpointer("ckpts", state, save=every(steps=5) | on.signal(), memory=every(steps=1)) as ckpt:
        for step in ckpt.steps(10**6):
            state["w"] += 1
            if step == 7:
                sealed(6)
                pathlib.Path("there").touch()
                time.sleep(1000)
"""
    process = started(tmp_path, TRAIN + script, "--grace", "2s")
    await_that((tmp_path / "there").exists)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 137 and "tenuto: saved from memory: main/" in err, err
    assert tenuto.load(tmp_path / "ckpts").state["w"][0] >= 6


def test_on_a_full_disk_training_continues_and_its_states_stay_in_memory(tmp_path: Path) -> None:
    script = """
whole = LocalStore.put_if_absent
def full(store, name, content, **more):
    if name.endswith(".safetensors") and os.environ["TENUTO_RESTART"] == "0":
        raise tenuto.errors.StoreFull("no space left", subject=name, hint="remove something")
    return whole(store, name, content, **more)
LocalStore.put_if_absent = full
with tenuto.Checkpointer("ckpts", state, save=every(steps=5), memory=every(steps=1)) as ckpt:
    for step in ckpt.steps(20):
        state["w"] += 1
        if step == 12 and os.environ["TENUTO_RESTART"] == "0":
            sealed(10)
            assert ckpt.latest_step() is None
            os.kill(os.getpid(), 9)
print(ckpt.step, state["w"][0])
"""
    done = finished(tmp_path, TRAIN + script)
    assert done.returncode == 0 and done.stdout == "20 20.0\n", done.stderr
    assert "no space left" in done.stderr and re.search(r"resumed run main at step 1[0-2] from memory", done.stderr)
