"""Several processes, started with `jax.distributed`: each saves its own shards, and any number restores them."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

import tenuto

PROGRAM = Path(__file__).with_name("processes_program.py")
DEADLINE_S = 150


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(where: Path | str, size: int, mesh: str, begin: int, upto: int) -> None:
    """Runs a job of `size` processes from the step `begin`, which it has to resume from, up to another one."""
    port = free_port()
    jobs = []
    for rank in range(size):
        out = Path(f"{where}.{rank}.done")
        out.unlink(missing_ok=True)
        arguments = [rank, size, port, where, mesh, begin, upto, out]
        command = [sys.executable, str(PROGRAM), *map(str, arguments)]
        jobs.append((out, subprocess.Popen(command, stderr=subprocess.PIPE, text=True)))
    said = [job.communicate(timeout=DEADLINE_S)[1] for _, job in jobs]
    for (out, job), text in zip(jobs, said, strict=True):
        assert job.returncode == 0 and out.exists(), f"exit status {job.returncode}\n{text[-3000:]}"


def test_two_processes_save_their_shards_and_any_number_restores_them(tmp_path: Path) -> None:
    where = tmp_path / "saved"
    run(where, 2, "2x2", 0, 2)
    with tenuto.open(where) as opened:
        assert {path: len(opened[path].parts) for path in ("both", "rows", "columns", "whole")} == {
            "both": 4,
            "rows": 2,
            "columns": 2,
            "whole": 1,
        }, "what several have is saved once"
        ranks = {path: {rank for rank, _, _ in opened[path].parts} for path in ("both", "rows")}
        assert ranks == {"both": {0, 1}, "rows": {0, 1}}
    run(where, 2, "4", 2, 3)
    run(where, 1, "2", 3, 4)
    run(where, 2, "4x1", 4, 5)


def test_processes_that_do_not_say_how_they_meet_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"this job has 2 processes of JAX(.|\n)*ranks=tenuto\.SharedFiles"):
        run("none", 2, "4", 0, 1)
