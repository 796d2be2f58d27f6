"""What a certificate says of modules that torch keeps the same on several ranks."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tenuto.integrations.torch.certificate import findings


def wrapped(*, find_unused: bool = False, static: bool = False) -> DistributedDataParallel:
    """As far as a certificate looks at one: a real one needs a group of processes."""
    module = DistributedDataParallel.__new__(DistributedDataParallel)
    torch.nn.Module.__init__(module)
    module.module = torch.nn.Linear(2, 2)
    module.process_group, module.find_unused_parameters, module.static_graph = None, find_unused, static
    return module


def says(module: torch.nn.Module) -> bool:
    return any("model: DistributedDataParallel puts gradients" in one for one in findings({"model": module}).caveats)


@pytest.mark.parametrize(("ranks", "told"), [(1, False), (2, False), (3, True)])
def test_sums_of_the_first_step_are_told_where_more_than_two_ranks_add_up(
    monkeypatch: pytest.MonkeyPatch, ranks: int, told: bool
) -> None:
    """Two numbers have one sum, in whatever order."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: ranks)
    assert says(wrapped()) is told
    assert says(wrapped(find_unused=True, static=True)) is told
    assert not says(wrapped(find_unused=True))
    assert not says(torch.nn.Linear(2, 2))
