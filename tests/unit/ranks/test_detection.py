"""Which ranks this process is one of. torch is never imported to find out."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest

import tenuto
from tenuto.errors import RanksNotSupported, UsageError
from tenuto.ranks.contract import Ranks
from tenuto.ranks.detection import Solo, find_ranks
from tenuto.ranks.kv.torch_store import TorchRanks


def torch(size: int, rank: int = 0, initialized: bool = True) -> dict[str, ModuleType]:
    module = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: initialized,
        get_world_size=lambda: size,
        get_rank=lambda: rank,
    )
    return {"torch.distributed": cast(ModuleType, module)}


def test_what_is_passed_comes_first() -> None:
    given = tenuto.SharedFiles("/nowhere", rank=1, world_size=3)
    assert isinstance(given, Ranks)
    assert find_ranks(given, {"WORLD_SIZE": "4"}, torch(2)) is given
    assert (given.rank, given.world_size, given.is_coordinator) == (1, 3, False)


def test_then_a_group_of_several() -> None:
    found = find_ranks(None, {"WORLD_SIZE": "4"}, torch(2, 1))
    assert found == TorchRanks(1, 2) and not found.is_coordinator and isinstance(found, Ranks)
    assert find_ranks(None, {"WORLD_SIZE": "4"}, torch(1)) == Solo()


def test_several_processes_that_cannot_meet_are_told_how() -> None:
    with pytest.raises(RanksNotSupported, match=r"8 processes .*WORLD_SIZE=8") as caught:
        find_ranks(None, {"WORLD_SIZE": "8"}, torch(2, initialized=False))
    assert caught.value.hint is not None
    assert "init_process_group" in caught.value.hint and "tenuto.SharedFiles(" in caught.value.hint


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": ""}, {"WORLD_SIZE": "x"}], ids=str)
def test_else_this_process_alone(environment: dict[str, str]) -> None:
    assert find_ranks(None, environment, {}) == Solo()


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_ranks_that_make_no_sense_are_refused(rank: int, world_size: int) -> None:
    with pytest.raises(UsageError, match="makes no sense"):
        tenuto.SharedFiles("/nowhere", rank=rank, world_size=world_size)


def test_torch_is_not_imported() -> None:
    code = "import sys, tenuto.ranks.detection as d; d.find_ranks(None, {}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
