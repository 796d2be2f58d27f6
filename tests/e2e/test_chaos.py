"""`tenuto chaos`, with real processes: each fault strikes once, its account is right, the training ends as it would."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.supervised import SRC, TENUTO

TRAINING = """
import numpy as np, os, tenuto, time
from tenuto import every
state, steps = {"w": np.zeros(100)}, 60
with tenuto.Checkpointer("ckpts", state, save=every(steps=5), memory=every(steps=1), on_unhealthy="stop") as ckpt:
    for step in ckpt.steps(steps):
        state["w"] += step
        ckpt.log(loss=float(state["w"][0]) / 1e6)
        time.sleep(0.02)
print("w", state["w"][0], "restarts", os.environ["TENUTO_RESTART"])
"""
END = f"w {float(sum(range(60)))} "


def chaos(directory: Path, script: str, *options: str, launcher: tuple[str, ...] = (sys.executable,)) -> Any:
    (directory / "train.py").write_text(script)
    command = [*TENUTO, "chaos", "--journal", "journal.jsonl", *options, "--", *launcher, "train.py"]
    return subprocess.run(
        command, cwd=directory, env={**os.environ, "PYTHONPATH": SRC}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip


def test_each_fault_of_a_trace_strikes_once_and_the_training_ends_as_without_them(tmp_path: Path) -> None:
    kinds = ["abort", "oom", "nan", "slow-store", "full-disk", "hang"]
    lasts = {"full-disk": "10m"}  # until the process is ended: whenever the next save comes, it finds no room
    lines = [
        json.dumps({"step": 6 + 9 * number, "kind": kind, "lasts": lasts.get(kind, "0.2s")})
        for number, kind in enumerate(kinds)
    ]
    (tmp_path / "faults.jsonl").write_text("\n".join(lines))
    done = chaos(tmp_path, TRAINING, "--trace", "faults.jsonl", "--hang", "4s", "--grace", "1s", "--json")
    assert done.returncode == 0, done.stderr
    assert f"{END}restarts 4\n" in done.stderr
    found = json.loads(done.stdout)
    assert [one["kind"] for one in found["injected"]] == kinds and found["left"] == 0
    ends = [one["outage"] and one["outage"]["kind"] for one in found["injected"]]
    assert ends == ["killed", "out of memory", "unhealthy", None, None, "hung"]
    for one in found["injected"]:
        outage = one["outage"]
        if outage is not None:
            assert outage["resumed"] + outage["lost_steps"] == outage["step"] and outage["lost_s"] > 0, one
    (rolled_back,) = (one["outage"] for one in found["injected"] if one["kind"] == "nan")
    assert rolled_back["how"].startswith(f"from step {rolled_back['resumed']}")
    assert "No space left on device (rehearsal)" in done.stderr


def test_the_account_for_people_has_a_line_for_each_fault_and_for_an_end_that_none_explains(tmp_path: Path) -> None:
    script = TRAINING.replace("ckpt.log", "assert step != 40 or os.environ['TENUTO_RESTART'] != '1'\n        ckpt.log")
    done = chaos(tmp_path, script, "--at", "step 8:kill")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in " ".join(done.stdout.split("\n" + " " * 10)).splitlines()]  # long rows go on below
    fault, own = (row for row in rows if "again;" in row)
    assert fault[0] == "kill" and "killed" in fault and own[:2] == ["no", "fault"] and "failed" in own, done.stdout
    assert "1 injected (1 x kill), 0 left" in done.stdout


def test_a_training_that_looks_at_no_loss_is_shown_to_train_on_with_nan(tmp_path: Path) -> None:
    done = chaos(tmp_path, TRAINING.replace(', on_unhealthy="stop"', ""), "--at", "step 8:nan", "--json")
    assert done.returncode == 0 and "w nan restarts 0" in done.stderr
    assert json.loads(done.stdout)["injected"][0]["outage"] is None


RANKS = """
import os, torch, torch.distributed as dist, tenuto, time
from tenuto import every
dist.init_process_group("gloo")
total = torch.zeros(1000)
with tenuto.Checkpointer("ckpts", {"total": total}, save=every(steps=10), memory=every(steps=1)) as ckpt:
    for step in ckpt.steps(30):
        part = torch.full((1000,), float(step * (dist.get_rank() + 1)))
        dist.all_reduce(part)
        total += part
        time.sleep(0.02)
if dist.get_rank() == 0:
    print("total", total[0].item(), "restarts", os.environ["TENUTO_RESTART"])
"""


@pytest.mark.long
def test_a_rank_that_is_cut_off_from_the_others_hangs_and_all_are_started_again(tmp_path: Path) -> None:
    (tmp_path / "faults.jsonl").write_text('{"step": 8, "kind": "partition", "rank": 1, "lasts": "10m"}\n')
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = chaos(tmp_path, RANKS, "--trace", "faults.jsonl", "--hang", "6s", "--json", launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert f"total {3.0 * sum(range(30))} restarts 1" in done.stderr and "connections are cut" in done.stderr
    (one,) = json.loads(done.stdout)["injected"]
    assert (one["rank"], one["outage"]["kind"]) == (1, "hung")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"kind": "kil"}', "line 2 of faults.jsonl: 'kil' is not a fault"),
        ('{"at": "soon", "kind": "kill"}', "line 2 of faults.jsonl: at='soon' is not a time"),
        ('{"at": "1s"}', "line 2 of faults.jsonl: 'kind' is missing"),
        ('{"at": "1s", "kind": "kill", "node": 1}', "line 2 of faults.jsonl: node is not known"),
        ("kill", "line 2 of faults.jsonl"),
    ],
)
def test_a_line_of_a_trace_that_makes_no_sense_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "faults.jsonl").write_text(f'{{"at": "1s", "kind": "kill"}}\n{line}\n')
    done = chaos(tmp_path, "", "--trace", "faults.jsonl")
    assert done.returncode == 2 and message in done.stderr, done.stderr


def test_without_a_rehearsal_nobody_looks_for_faults(tmp_path: Path) -> None:
    script = """
import numpy as np, sys, tenuto
with tenuto.Checkpointer("ckpts", {"w": np.zeros(3)}) as ckpt:
    for step in ckpt.steps(3):
        pass
print([name for name in sys.modules if "own_faults" in name or "struck" in name])
"""
    (tmp_path / "train.py").write_text(script)
    done = subprocess.run(
        [*TENUTO, "run", "--", sys.executable, "train.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": SRC},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == "[]\n", done.stderr


def test_the_settings_file_says_what_follows_a_fault_and_what_lies_in_memory_is_saved(tmp_path: Path) -> None:
    (tmp_path / "tenuto.toml").write_text('[supervise]\non = ["killed=stop"]\nnotices = "off"\n')
    script = TRAINING.replace("save=every(steps=5)", "save=every(steps=1000)")
    done = chaos(tmp_path, script, "--at", "step 20:kill", "--json")
    assert done.returncode == 137, done.stderr
    assert json.loads(done.stdout)["restarts"] == 0, "a default would start it again"
    saved = re.search(r"tenuto: saved from memory: main/a0002/(\d+)", done.stderr)
    assert saved and int(saved[1]) >= 18, done.stderr
