"""`tenuto run --risk` and `tenuto risk`, with real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import tenuto
from support.made_up_telemetry import recording
from support.supervised import TENUTO, events, finished
from tenuto.supervisor.risk.model import Model
from tenuto.supervisor.risk.recording import read_recording, write_recording

SURE = Model("logistic", 600, 600, 0.5, ["memory.host_available_bytes.last"], [0.0], 6.0, [0.0], [1e12], [5.0])
"""It expects a fault at any time, and more so the more memory there is."""
SCRIPT = """
import time, numpy as np, tenuto
from tenuto import every
state = {"w": np.zeros(100)}
with tenuto.Checkpointer("ckpts", state, save=every(minutes=60)) as ckpt:
    for step in ckpt.steps(100_000):
        state["w"] += 1
        if step == 1:
            ckpt.save(wait=True)
        if ckpt.stats.committed > 1:
            ckpt.stop()
        time.sleep(0.02)
"""


def test_an_alarm_has_the_training_save_and_the_checkpoint_says_why(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(SURE.text())
    done = finished(tmp_path, SCRIPT, "--risk", "model.json", "--record", "telemetry.jsonl", "--notices", "off")
    assert done.returncode == 0, done.stderr
    assert "tenuto: risk: a fault within 10 min 00 s with a probability of 1.00" in done.stderr
    assert ": the training is asked for a save" in done.stderr
    assert [one["finding"] for one in events(tmp_path) if one["event"] == "finding"].count("risk") >= 1
    why = [
        json.loads(
            subprocess.check_output([*TENUTO, "show", "ckpts", "--step", str(one.step), "--json"], cwd=tmp_path)
        )["environment"].get("why", "")
        for one in tenuto.Repository(tmp_path / "ckpts").checkpoints()
    ]
    assert any("risk: a fault within" in one for one in why), why
    assert read_recording(tmp_path / "telemetry.jsonl")[-1].kind == "finished"


def test_off_and_a_model_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text("{}")
    done = finished(tmp_path, "", "--risk", "model.json")
    assert done.returncode == 2 and "holds no model of risk" in done.stderr and "tenuto risk train" in done.stderr
    assert finished(tmp_path, "", "--risk", "off").returncode == 0
    (tmp_path / "bad.jsonl").write_text("no sample\n")
    done = finished(tmp_path, "", "--record", "bad.jsonl")
    assert done.returncode == 0 and "bad.jsonl, line 1: " in done.stderr


def test_a_model_is_trained_evaluated_and_used_without_scikit_learn(tmp_path: Path) -> None:
    write_recording(tmp_path / "telemetry.jsonl", recording(1, faults=20))
    done = subprocess.run(
        [*TENUTO, "risk", "train", "telemetry.jsonl", "-o", "model.json"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("model.json: logistic, ") and "precision" in done.stdout
    hidden = "import sys; sys.modules['sklearn'] = None; "
    command = [sys.executable, "-c", hidden + TENUTO[2], "risk", "eval", "model.json", "telemetry.jsonl", "--json"]
    found = json.loads(subprocess.check_output(command, cwd=tmp_path))
    assert found["faults"] < 20 and found["precision"] >= 0.7 and found["recall"] >= 0.6
    assert found["lead_s"] > 60 and found["calibration"]
    refused = subprocess.run(
        [sys.executable, "-c", hidden + TENUTO[2], "risk", "train", "telemetry.jsonl", "-o", "other.json"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert refused.returncode == 3 and ".[risk]" in refused.stderr
