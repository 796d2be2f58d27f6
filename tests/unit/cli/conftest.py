"""A repository to look at, made once: run `gpt` with a line that was left behind, run `small` with one checkpoint."""

import re
import shutil
import time

import numpy as np
import pytest

from tenuto.cli import main
from tenuto.cli.views import ages
from tenuto.engine.save.job import ManifestDetails
from tenuto.engine.save.saver import Saver
from tenuto.model.ids import CheckpointId
from tenuto.repo.notes import add_note
from tenuto.repo.ownership.claim import claim
from tenuto.repo.repository import Repo
from tenuto.state.encode.flattener import flatten
from tenuto.store.registry import open_store

STATE = {
    "model": {"layers.0.weight": np.arange(256 * 64, dtype=np.float32).reshape(256, 64), "layers.0.bias": np.ones(256)},
    "optimizer": {
        "state": {"w": {"exp_avg": np.ones((256, 64)), "step": 3}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "nesterov": False}],
    },
    "name": "gpt",
    "history": [1.0, 2.0, float("nan")],
    "empty": {},
}


def save(repo, run, steps, state=STATE, parent=None):
    """Saves one attempt's steps, as a training loop would."""
    attempt = claim(repo, run, parent)
    saver = Saver(repo, run)
    saver.attempt = attempt
    for step in steps:
        about = ManifestDetails(
            parent=parent,
            metrics={"loss": 1 / step, "val_loss": float("nan") if step == 6 else 0.5},
            progress={"step": step, "epoch": 0},
            environment={"python": "3.11"},
            certificate={"exact": False, "reasons": ["shuffled by hand"], "covers": ["model", "step and epoch"]},
        )
        saver.save(flatten(state), step, wait=True, about=about).wait()
    attempt.release()
    saver.close()


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    place = tmp_path_factory.mktemp("cli") / "ckpts"
    repo = Repo.create_or_open(open_store(place))
    save(repo, "gpt", [2, 4, 6, 8])
    save(repo, "gpt", [5, 7], parent=CheckpointId("gpt", 1, 4))
    add_note(repo, CheckpointId("gpt", 2, 5), "verified", {"every_byte": True})
    add_note(repo, CheckpointId("gpt", 2, 7), "metric", {"late": 0.25})
    save(repo, "small", [1], {"x": np.arange(5)})
    return place


@pytest.fixture
def place(made, tmp_path):
    """A copy of it that a test may change."""
    return shutil.copytree(made, tmp_path / "ckpts")


@pytest.fixture
def cli(capsys, monkeypatch):
    """Runs a command at 80 columns without colour, five hours later; returns status, stdout, stderr, with
    what differs from run to run taken out."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("TENUTO_WHERE", raising=False)
    later = time.time() + 5 * 3600
    monkeypatch.setattr(ages, "clock", lambda: later)

    def run(*words):
        with pytest.raises(SystemExit) as caught:
            main([str(word) for word in words])
        found = capsys.readouterr()
        # SystemExit(None) is 0, as for the interpreter.
        return caught.value.code or 0, settled(found.out), settled(found.err)

    return run


def settled(text):
    text = re.sub(r"/\S*/ckpts", "/ckpts", text)
    text = re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "2030-01-02T03:04:05Z", text)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "2030-01-02 03:04", text)
    text = re.sub(r"\b[0-9a-f]{64}\b", "<64 digits>", text)
    text = re.sub(r"\b[0-9a-f]{32}\b", "<32 digits>", text)
    # Small objects may grow by a few bytes from version to version.
    text = re.sub(r"\b19\d KiB", "198 KiB", text)
    text = re.sub(r"\b(39|40)\d KiB", "397 KiB", text)
    text = re.sub(r"\b1\.1\d MiB", "1.17 MiB", text)
    return re.sub(r"in [0-9.]+ (us|ms|s)\b", "in 1 ms", text)


def flip(path, offset):
    """One bit of a file, as a bad disk would."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
