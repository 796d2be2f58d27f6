"""Sharded state over two and four real processes: the rows of all ranks make up every tensor exactly once, and what was
saved comes back into parts and wholes alike. Each process group runs all of its checks, one after another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sharded_program

PROGRAM = Path(sharded_program.__file__)
DEADLINE_S = 240


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    return {world: _run(world, tmp_path_factory.mktemp(f"ranks{world}")) for world in sharded_program.CHECKS}


def _run(world: int, place: Path) -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    logs = [place / f"log.{rank}" for rank in range(world)]
    ranks = []
    for rank, log in enumerate(logs):
        command = [sys.executable, str(PROGRAM), str(rank), str(world), str(place / "store"), str(place / "out")]
        with log.open("w") as out:
            ranks.append(subprocess.Popen(command, stdout=out, stderr=out, env=environment))
    try:
        for rank in ranks:
            rank.wait(DEADLINE_S)
    finally:
        for rank in ranks:
            rank.kill()
    found: dict[str, str] = json.loads((place / "out").read_text()) if (place / "out").exists() else {}
    told = "\n".join(f"rank {rank}: {log.read_text()[-4000:]}" for rank, log in enumerate(logs))
    return {name: found.get(name, told) for name in sharded_program.CHECKS[world]}


@pytest.mark.parametrize(
    ("world", "name"), [(world, name) for world, checks in sharded_program.CHECKS.items() for name in checks]
)
def test_over_ranks(outcomes: dict[int, dict[str, str]], world: int, name: str) -> None:
    assert not outcomes[world][name], outcomes[world][name]
