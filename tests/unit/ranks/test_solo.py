"""More than one process is refused by what gives it away; torch is never imported to find out."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest

from holdfast.errors import RanksNotSupported
from holdfast.ranks.contract import Ranks
from holdfast.ranks.solo import solo


def torch(available: bool, initialized: bool, size: int) -> dict[str, ModuleType]:
    module = SimpleNamespace(
        is_available=lambda: available, is_initialized=lambda: initialized, get_world_size=lambda: size
    )
    return {"torch.distributed": cast(ModuleType, module)}


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": ""}, {"WORLD_SIZE": "x"}], ids=str)
def test_one_process_is_the_coordinator(environment: dict[str, str]) -> None:
    ranks = solo(environment, {})
    assert isinstance(ranks, Ranks)
    assert (ranks.rank, ranks.world_size, ranks.is_coordinator) == (0, 1, True)


def test_several_processes_are_refused_by_name() -> None:
    with pytest.raises(RanksNotSupported, match=r"8 processes \(WORLD_SIZE=8\)"):
        solo({"WORLD_SIZE": "8"}, {})
    with pytest.raises(RanksNotSupported, match=r"4 processes \(torch.distributed is initialised\)"):
        solo({}, torch(True, True, 4))


def test_a_group_that_is_not_there_yet_or_has_one_member_is_no_matter() -> None:
    assert solo({}, torch(True, False, 4)).world_size == 1
    assert solo({}, torch(False, True, 4)).world_size == 1
    assert solo({"WORLD_SIZE": "4"}, torch(True, True, 1)).world_size == 1
    assert solo({}, {"torch.distributed": ModuleType("torch.distributed")}).world_size == 1


def test_torch_is_not_imported() -> None:
    code = "import sys, holdfast.ranks.solo as s; s.solo({}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
