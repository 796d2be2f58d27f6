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
from support import loaded_interpreter
from support.loaded_interpreter import Program

TENUTO = [sys.executable, "-c", "from tenuto.cli.application import run; run()"]
SRC = str(Path(tenuto.__file__).parents[1])


def started(directory: Path, script: str, *options: str, **more: Any) -> subprocess.Popen[str]:
    """In an interpreter of its own; see `asked` for the arguments."""
    words, environment = asked(directory, script, options, **more)
    return subprocess.Popen(
        [*TENUTO, *words], cwd=directory, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finished(directory: Path, script: str, *options: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """The supervisor is forked from an interpreter that has loaded the command, if `variables` do not say where modules
    lie; what it starts is not."""
    if "PYTHONPATH" in (more.get("variables") or {}):
        process = started(directory, script, *options, **more)
        out, err = process.communicate(timeout=100)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)
    words, environment = asked(directory, script, options, **more)
    return loaded_interpreter.run([*TENUTO[1:], *words], cwd=directory, env=environment, timeout=100)


def on_node(directory: Path, script: str, node: int, nodes: int, *options: str, **more: Any) -> Program:
    """The supervisor of one node of a job; its script's argument is the node. Its journal is `node-N.jsonl`."""
    here = ["--nodes", str(nodes), "--node-rank", str(node), "--meet", "meet", "--journal", f"node-{node}.jsonl"]
    words, environment = asked(directory, script, [*here, *options], arguments=[str(node)], **more)
    return Program([*TENUTO[1:], *words], cwd=directory, env=environment)


def on_nodes(directory: Path, script: str, nodes: int, *options: str, **more: Any) -> list[Program]:
    return [on_node(directory, script, node, nodes, *options, **more) for node in range(nodes)]


def ends(programs: Sequence[Program]) -> list[tuple[int | None, str, str]]:
    """Returns the status, stdout and stderr of each, once all have ended."""
    said = [program.communicate(timeout=100) for program in programs]
    return [(program.returncode, *one) for program, one in zip(programs, said, strict=True)]


def asked(
    directory: Path,
    script: str,
    options: Sequence[str],
    *,
    arguments: Sequence[str] = (),
    launcher: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Writes the script. Returns the arguments of `tenuto` that supervise it, and the environment. `launcher`: what
    stands before the script instead of this interpreter. `variables`: of the environment."""
    (directory / "train.py").write_text(script)
    what = [*(launcher or [sys.executable]), "train.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": SRC, **(variables or {})}
    return ["run", "--journal", "journal.jsonl", *options, "--", *what], environment


def events(directory: Path, journal: str = "journal.jsonl") -> list[dict[str, Any]]:
    path = directory / journal
    return [json.loads(line) for line in path.read_text().splitlines()]


def happened(directory: Path, node: int, event: str) -> list[dict[str, Any]]:
    """Returns what the journal of a node has of an event so far."""
    name = f"node-{node}.jsonl"
    return [one for one in events(directory, name) if one["event"] == event] if (directory / name).exists() else []


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
