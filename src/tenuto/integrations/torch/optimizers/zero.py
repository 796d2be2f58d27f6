"""ZeroRedundancyOptimizer: each rank updates some of the parameters, by an optimizer of its own around those.

That optimizer is what is saved: each rank has the state of its own parameters, all ranks together have all of it, and
so a plain optimizer can take it, or as many ranks as there are then.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from torch.optim import Optimizer

from tenuto.errors import StateError
from tenuto.state.tree import ROOT

_HOME: Final = "torch.distributed.optim.zero_redundancy_optimizer"


def local_optimizer(optimizer: Optimizer, path: str) -> Optimizer:
    """Returns this rank's own optimizer in a ZeroRedundancyOptimizer, with the options that the outer one shows; any
    other optimizer unchanged. Raises StateError where there is none."""
    kind = getattr(sys.modules.get(_HOME), "ZeroRedundancyOptimizer", None)
    if kind is None or not isinstance(optimizer, kind):
        return optimizer
    zero: Any = optimizer
    if zero._overlap_with_ddp:
        raise StateError(
            f"{path or ROOT}: a ZeroRedundancyOptimizer with overlap_with_ddp=True has no optimizer to save: it "
            "updates parameters by functions",
            subject=path or ROOT,
            hint="ZeroRedundancyOptimizer(…, overlap_with_ddp=False)",
        )
    zero._sync_param_groups(zero.param_groups, zero.optim.param_groups)  # as its own step does before anything else
    local: Optimizer = zero.optim
    return local


def publish_options(optimizer: Any) -> None:
    """Shows the options of this rank's own optimizer, such as the learning rate, in the outer one's groups."""
    optimizer._sync_param_groups(optimizer.optim.param_groups, optimizer.param_groups)
