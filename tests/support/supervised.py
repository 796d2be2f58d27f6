"""Trainings under `tenuto run`, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tenuto

TENUTO = [sys.executable, "-c", "from tenuto.cli.application import run; run()"]
SRC = str(Path(tenuto.__file__).parents[1])


def started(
    directory: Path,
    script: str,
    *options: str,
    arguments: Sequence[str] = (),
    launcher: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """`launcher`: what stands before the script instead of this interpreter. `variables`: of the environment."""
    (directory / "train.py").write_text(script)
    what = [*(launcher or [sys.executable]), "train.py", *arguments]
    command = [*TENUTO, "run", "--journal", "journal.jsonl", *options, "--", *what]
    environment = {**os.environ, "PYTHONPATH": SRC, **(variables or {})}
    return subprocess.Popen(
        command, cwd=directory, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finished(directory: Path, script: str, *options: str, **more: Any) -> subprocess.CompletedProcess[str]:
    process = started(directory, script, *options, **more)
    out, err = process.communicate(timeout=100)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def events(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "journal.jsonl").read_text().splitlines()]


def await_that(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
