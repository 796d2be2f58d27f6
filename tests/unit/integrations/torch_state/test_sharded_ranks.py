"""Sharded state over two and four real processes: the rows of all ranks make up every tensor exactly once, and what was
saved comes back into parts and wholes alike. Whole saves and restores over them. Each process group runs all of its
checks, one after another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support import forked_processes as forked
from support import sharded_program, sharded_saves

PROGRAM = Path(sharded_saves.__file__)
"""It has the checks of `sharded_program`, and those of whole saves."""
DEADLINE_S = 240


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    return {world: _run(world, tmp_path_factory.mktemp(f"ranks{world}")) for world in sharded_program.CHECKS}


def _run(world: int, place: Path) -> dict[str, str]:
    log = place / "log"
    forked.job(PROGRAM, world, str(place / "out"), log=log, timeout=DEADLINE_S)
    found: dict[str, str] = json.loads((place / "out").read_text()) if (place / "out").exists() else {}
    return {name: found.get(name, forked.told(log, world)) for name in sharded_program.CHECKS[world]}


@pytest.mark.parametrize(
    ("world", "name"), [(world, name) for world, checks in sharded_program.CHECKS.items() for name in checks]
)
def test_over_ranks(outcomes: dict[int, dict[str, str]], world: int, name: str) -> None:
    assert not outcomes[world][name], outcomes[world][name]
