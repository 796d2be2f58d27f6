"""From `kill -9` to the first new step: under `tenuto run` with memory, and under torchrun with torch.save.

    python benchmarks/recover.py --gib 0.05 --rounds 7

Each round kills the training of each once, at a step between two saves. The way back is split by what the new process
writes down: *started* (its first line runs; before it lie detection and the interpreter's start), *imported* (torch,
and Tenuto where that is used), *restored*, and *first new step* (one that the killed process had not come to: with
torch.save that includes the steps since the last save, which are trained again). Both train the same state with the
same pause in each step, and save to disk every 20 steps; with memory, each step is kept there too.

Then a real storm: a training that is killed every 50 restarts' time (that until the first new step, as measured), and
the share of its time in which it came to new steps (ETTR), as its journal has it.
Target: ETTR at least 0.97.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import Result, arguments, median_interval, note, report, workplace

from tenuto.report.supervision import supervisions

OURS, PEER = "tenuto run, memory", "torchrun --max-restarts, torch.save"
PHASES = ("started", "imported", "restored", "first new step")
SAVE_EVERY = 20
STEP_S = 0.05
RARE = 50
"""The mean time between failures, in restarts."""

TRAINING = """
import json, os, sys, time
place, ours, gib, steps, save_every, step_s = sys.argv[1], sys.argv[2] == "ours", *map(float, sys.argv[3:])
def mark(what, step=0):
    with open(f"{place}/marks", "a") as file:
        file.write(json.dumps([os.getpid(), what, step, time.time()]) + "\\n")
mark("started")
import torch
if ours:
    import tenuto
    from tenuto import every
    tenuto.Checkpointer
torch.set_num_threads(1)
mark("imported")
leaves = 50
state = {f"layers.{n}": torch.zeros(int(gib * 2**30 / 4 / leaves)) for n in range(leaves)}
def train(step):
    for one in state.values():
        one.add_(1)
    time.sleep(step_s)
    mark("step", step + 1)
if ours:
    save, memory = every(steps=int(save_every)), every(steps=1)
    with tenuto.Checkpointer(f"{place}/ckpts", {"model": state}, save=save, memory=memory, log="silent") as ckpt:
        ckpt.restore()
        mark("restored")
        for step in ckpt.steps(int(steps)):
            train(step)
else:
    path, first = f"{place}/state.pt", 0
    if os.path.exists(path):
        found = torch.load(path)
        first = found["step"]
        for name, one in state.items():
            one.copy_(found["model"][name])
    mark("restored")
    for step in range(first, int(steps)):
        train(step)
        if (step + 1) % int(save_every) == 0:
            torch.save({"model": state, "step": step + 1}, path + ".new")
            os.replace(path + ".new", path)
assert all(float(one[0]) == float(one[-1]) == steps for one in state.values())
"""


def more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--storm", type=int, default=5, help="kills of the storm, 0: none (default %(default)d)")


def marks(place: Path) -> list[tuple[int, str, int, float]]:
    lines = (place / "marks").read_text().split("\n")[:-1] if (place / "marks").exists() else []
    return [(pid, what, step, at) for pid, what, step, at in map(json.loads, lines)]


def command(place: Path, ours: bool, options: argparse.Namespace, steps: int) -> list[str]:
    (place / "train.py").write_text(TRAINING)
    words = [str(place), "ours" if ours else "peer", *map(str, (options.gib, steps, SAVE_EVERY, STEP_S))]
    if ours:
        journal = ["--journal", str(place / "journal.jsonl"), "--per-hour", "1000"]
        run = [sys.executable, "-m", "tenuto", "run", *journal, "--", sys.executable]
    else:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--max-restarts=99"]
    return [*run, str(place / "train.py"), *words]


def newest(place: Path) -> tuple[int, int]:
    """The process that made the last step, and the step."""
    steps = [(pid, step) for pid, what, step, _ in marks(place) if what == "step"]
    return steps[-1] if steps else (0, 0)


def kill_at(place: Path, process: subprocess.Popen[bytes], step: int, but: int = 0) -> tuple[int, int, float]:
    """Kills the training once it has come to a step, unless that is process `but`; who, where and when."""
    while True:
        pid, reached = newest(place)
        if reached >= step and pid != but:
            os.kill(pid, signal.SIGKILL)
            return pid, reached, time.time()
        assert process.poll() is None, f"it ended by itself, with status {process.returncode}"
        time.sleep(0.005)


def way_back(place: Path, ours: bool, options: argparse.Namespace) -> dict[str, float]:
    """Seconds from the kill to each phase of the way back."""
    place.mkdir()
    process = subprocess.Popen(
        command(place, ours, options, 5 * SAVE_EVERY), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    pid, step, killed = kill_at(place, process, 2 * SAVE_EVERY + SAVE_EVERY // 2)
    assert process.wait(300) == 0
    reached = max(one for who, what, one, _ in marks(place) if what == "step" and who == pid)
    found: dict[str, float] = {}
    for who, what, one, at in marks(place):
        if who != pid and what != "step":
            found.setdefault(what, at - killed)
        elif who != pid and one > max(reached, step):
            found.setdefault("first new step", at - killed)
    return found


def storm(place: Path, options: argparse.Namespace, restart_s: float) -> dict[str, Any]:
    """A training that is killed every RARE restarts' time, first after half of it; and what its journal says of it."""
    place.mkdir()
    between_s = RARE * restart_s
    waits = [between_s / 2, *[between_s] * (options.storm - 1)]
    steps = int(2 * options.storm * between_s / STEP_S)
    process = subprocess.Popen(
        command(place, True, options, steps), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    kills, last = 0, 0
    for wait_s in waits:
        until = time.monotonic() + wait_s
        while time.monotonic() < until and process.poll() is None:
            time.sleep(0.05)
        if process.poll() is not None:
            break
        last, _, _ = kill_at(place, process, 1, but=last)
        kills += 1
    time.sleep(between_s / 2)
    process.send_signal(signal.SIGTERM)  # it saves, and leaves
    process.wait(600)
    (found,) = supervisions([place / "journal.jsonl"])
    told = {"kills": kills, "between_s": between_s, "seconds": found.ended_s - found.began_s}
    return {**told, "lost_s": found.lost_s, "ettr": found.ettr}


def main() -> None:
    options = arguments(__doc__ or "", add=more_options, gib=0.05)
    rounds = options.rounds or 7
    seconds: dict[str, list[float]] = {f"{who}: {phase}": [] for who in (OURS, PEER) for phase in PHASES}
    with workplace(options) as place:
        for number in range(rounds):
            for who in (OURS, PEER) if number % 2 else (PEER, OURS):
                found = way_back(place / f"{number}-{who == OURS}", who == OURS, options)
                for phase in PHASES:
                    seconds[f"{who}: {phase}"].append(found[phase])
            note(f"round {number + 1} of {rounds}")
        nbytes = int(options.gib * (1 << 30))
        result = Result("recover", seconds, nbytes, sized=False)
        result.facts["shared"] = "other work ran on the machine meanwhile: see load_at_start"
        restart_s = median_interval(seconds[f"{OURS}: first new step"])[0]
        if options.storm:
            result.facts["storm"] = stormed = storm(place / "storm", options, restart_s)
            ettr = stormed["ettr"]
            result.judge_value("share of a storm's time in new steps >= 0.97", (ettr, ettr, ettr), at_least=0.97)
        report(result, options, place)


if __name__ == "__main__":
    main()
