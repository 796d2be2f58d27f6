"""P20: what goes among many checkpoints: gc with a million chunks, and commands beside those of restic, Borg and DVC.

    python benchmarks/p20_history.py

gc plans what it would free of 1,000 checkpoints of 1,000 chunks each, everything looked at anew. The commands work on a
like history: SAVES saves of a small state a day apart by their times, and as many snapshots of one file in restic and
Borg (made with --time and --timestamp), or files in a directory that DVC tracks. Each is a process of its own, start
included: what goes by the same rule (`tenuto keep --dry-run`, `restic forget --dry-run`, `borg prune --dry-run`), and a
list of all (`tenuto ls`, `restic snapshots`, `borg list`, `dvc list`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest import mock

import numpy as np
from grown_repository import grow
from harness import (
    Contender,
    Result,
    arguments,
    choosing,
    compare,
    left_out,
    median_interval,
    note,
    report,
    timed,
    workplace,
)

import tenuto
from tenuto import every, keep
from tenuto.engine.save import job
from tenuto.maintenance.gc import plan_gc
from tenuto.model.ids import CheckpointId
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

CHECKPOINTS, CHUNKS, CHUNK = 1_000, 1_000, 4096
SAVES = 40
GC_S = 5.0
BESIDE = ("restic", "borg", "dvc")
FIRST = datetime(2026, 1, 1, 12, tzinfo=UTC)


def grown(where: Path) -> Repo:
    """Checkpoints of CHUNKS chunks each; their data files are one file under many names."""
    repo = Repo.create_or_open(open_store(where), chunk_bytes=CHUNK)
    with tenuto.Checkpointer(
        where, {"w": np.arange(CHUNKS * CHUNK // 8)}, save=every(steps=1), keep=keep.all()
    ) as ckpt:
        for _ in ckpt.steps(1):
            pass
    first = CheckpointId("main", 1, 1)
    index = repo.index(repo.manifest(first))
    assert CHUNKS <= len(index.digests) < 1.1 * CHUNKS, f"{len(index.digests)} chunks"

    def put(name: str, data: bytes) -> None:
        path = where / name
        path.parent.mkdir(exist_ok=True)
        if name.endswith(".safetensors"):
            os.link(where / first.directory / path.name, path)
        else:
            path.write_bytes(data)

    grow(repo, first, range(2, CHECKPOINTS + 1), put)
    return repo


def saved_daily(where: Path) -> None:
    state = {"w": np.zeros(1000)}
    for step in range(1, SAVES + 1):
        when = (FIRST + timedelta(days=step)).isoformat().replace("+00:00", "Z")
        with mock.patch.object(job, "now_text", lambda when=when: when):
            tenuto.save(state, where, step=step)


def commands(place: Path, wanted: list[str]) -> dict[str, list[str]]:
    """Makes the histories, and returns the commands to measure, by what they are called in the result."""
    own = [sys.executable, "-m", "tenuto"]
    saved_daily(place / "daily")
    daily = str(place / "daily")
    found = {
        "tenuto keep --dry-run": [
            *own,
            "keep",
            daily,
            "--latest",
            "3",
            "--daily",
            "14",
            "--monthly",
            "12",
            "--dry-run",
        ],
        "tenuto ls": [*own, "ls", daily],
    }
    file = place / "file"
    file.write_bytes(bytes(8000))
    os.environ |= {"RESTIC_PASSWORD": "x", "BORG_BASE_DIR": str(place / "borg-home")}
    restic = ["restic", "-q", "--no-cache", "-r", str(place / "restic")]
    borg = str(place / "borg")
    if "restic" in wanted:
        _done([*restic, "init"])
        for day in range(1, SAVES + 1):
            _done([*restic, "backup", "--time", f"{FIRST + timedelta(days=day):%Y-%m-%d %H:%M:%S}", str(file)])
        rule = ["--keep-last", "3", "--keep-daily", "14", "--keep-monthly", "12"]
        found |= {
            "restic forget --dry-run": [*restic, "forget", "--dry-run", *rule],
            "restic snapshots": [*restic, "snapshots"],
        }
    if "borg" in wanted:
        _done(["borg", "init", "-e", "none", borg])
        for day in range(1, SAVES + 1):
            when = f"{FIRST + timedelta(days=day):%Y-%m-%dT%H:%M:%S}"
            _done(["borg", "create", "--timestamp", when, f"{borg}::day{day}", str(file)])
        rule = ["--keep-last", "3", "--keep-daily", "14", "--keep-monthly", "12"]
        found |= {
            "borg prune --dry-run": ["borg", "prune", "--dry-run", *rule, borg],
            "borg list": ["borg", "list", borg],
        }
    if "dvc" in wanted:
        tracked = place / "dvc"
        (tracked / "saves").mkdir(parents=True)
        for step in range(1, SAVES + 1):
            (tracked / f"saves/step-{step}.bin").write_bytes(bytes([step]) * 8000)
        for words in (["git", "init", "-q"], ["dvc", "init", "-q"], ["dvc", "add", "-q", "saves"]):
            _done(words, cwd=tracked)
        found["dvc list"] = ["dvc", "list", str(tracked), "saves"]
    return found


def _done(command: list[str], cwd: Path | None = None) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=cwd)


def main() -> None:
    options = arguments(__doc__ or "", add=lambda parser: choosing(parser, BESIDE), gib=0.0, leaves=1, rounds=5)
    missing = [name for name in options.beside if shutil.which(name) is None]
    if missing:
        note(f"not installed, left out: {', '.join(missing)}")
        options.beside = [name for name in options.beside if name not in missing]
    with workplace(options) as place:
        repo = grown(place / "grown")
        note(f"made {CHECKPOINTS:,} checkpoints of {CHUNKS:,} chunks")
        processor: list[float] = []

        def plan() -> float:
            began = time.process_time()
            took = timed(lambda: plan_gc(repo))
            processor.append(time.process_time() - began)
            return took

        def run(command: list[str]) -> Callable[[], float]:
            return lambda: timed(lambda: _done(command))

        contenders = [Contender("gc plans, 1,000,000 chunks", plan)]
        contenders += [Contender(name, run(command)) for name, command in commands(place, options.beside).items()]
        found = compare(contenders, rounds=options.rounds, own=contenders[0].name, note=note)
        result = Result("p20_history", found, 0, speeds=False)
        result.facts["saves"] = SAVES
        result.facts["processor seconds of gc's plan"] = float(np.median(processor))
        took = median_interval([1e3 * one for one in found[contenders[0].name]])
        result.judge_value(f"gc plans 1,000,000 chunks <= {GC_S:g} s", took, at_most=1e3 * GC_S, unit="ms")
        left_out(result, options, BESIDE)
        report(result, options, place)


if __name__ == "__main__":
    main()
