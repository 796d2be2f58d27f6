"""A training whose repository lies on several mounts at once."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import tenuto
from tenuto.cli.application import run
from tenuto.errors import StoreError, TenutoError

PROGRAM = """
import os, sys
import numpy as np
import tenuto

*mounts, kill_at = sys.argv[1:]
state = {"w": np.zeros(500_000, np.float32), "n": 0}
np.random.seed(0)
where = tenuto.Stripe(*mounts, part="64KiB")
with tenuto.Checkpointer(where, state, save=tenuto.every(steps=3) | tenuto.on.end()) as ckpt:
    for step in ckpt.steps(20):
        if step == int(kill_at):
            ckpt.wait()
            os.kill(os.getpid(), 9)
        state["w"] += np.random.random(500_000).astype(np.float32)
        state["n"] += 1
"""


def trained(mounts, kill_at=-1):
    words = [sys.executable, "-c", PROGRAM, *map(str, mounts), str(kill_at)]
    return subprocess.run(words, check=False, capture_output=True, text=True)


def state_of(where):
    into = {"w": np.zeros(500_000, np.float32), "n": 0}
    tenuto.load(where, into=into)
    return into


@pytest.fixture
def mounts(tmp_path):
    return [tmp_path / name for name in ("one", "two", "three")]


def test_it_is_killed_and_goes_on_from_all_mounts(mounts, tmp_path, capsys):
    assert trained(mounts, kill_at=11).returncode == -9
    done = trained(mounts[::-1])
    assert done.returncode == 0 and "at step 9" in done.stderr, done.stderr
    whole = state_of(tenuto.Stripe(*mounts))
    assert whole["n"] == 20
    packs = [list((mount / "stripes").rglob("*.safetensors.*")) for mount in mounts]
    assert all(packs), "each mount has a share of the data files"
    with pytest.raises(SystemExit) as ended:
        run(["verify", tenuto.Stripe(*mounts).url])
    assert not ended.value.code, capsys.readouterr()
    again = [tmp_path / name for name in ("four", "five", "six")]
    assert trained(again).returncode == 0
    assert np.array_equal(state_of(tenuto.Stripe(*again))["w"], whole["w"])


def test_without_one_mount_it_says_which_is_missing_and_starts_nothing_anew(mounts):
    assert trained(mounts).returncode == 0
    mounts[1].rename(mounts[1].with_name("elsewhere"))
    mounts[1].mkdir()
    done = trained(mounts)
    assert done.returncode != 0 and str(mounts[1]) in done.stderr and "findmnt" in done.stderr, done.stderr
    assert not list(mounts[1].iterdir())
    with pytest.raises(StoreError, match=str(mounts[1])):
        state_of(tenuto.Stripe(*mounts))


def test_one_mount_alone_is_no_repository(mounts):
    assert trained(mounts).returncode == 0
    with pytest.raises(TenutoError) as caught:
        tenuto.load(mounts[0], into=state_of(tenuto.Stripe(*mounts)))
    assert caught.value.hint is not None and tenuto.Stripe(*mounts).url in caught.value.hint
