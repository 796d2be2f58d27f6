"""What each rank runs: trains without an end, and says what it has raised. `store_program.py PLACE`."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist

import tenuto
from campaigns.rank_kills.training import Numbers
from tenuto.errors import RanksError
from tenuto.policy import every

place = Path(sys.argv[1])
warnings.simplefilter("ignore")
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
(place / f"pid-{rank}").write_text(str(os.getpid()))
numbers = Numbers(rank, world)
said: dict[str, Any] = {}
try:
    with tenuto.Checkpointer(
        place / "checkpoints", numbers.state(), save=every(steps=3), on_error="raise", ranks_timeout=10.0
    ) as ckpt:
        for step in ckpt.steps(10**9):
            numbers.step(step + 1)
            time.sleep(0.01)
except BaseException as error:  # noqa: BLE001 - told to the test
    said = {"error": type(error).__name__, "message": str(error), "ranks": [], "phase": ""}
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RanksError):
            said |= {"behind": type(cause).__name__, "ranks": list(cause.ranks), "phase": cause.phase}
            break
        cause = cause.__cause__
(place / f"said-{rank}.json.part").write_text(json.dumps(said))
(place / f"said-{rank}.json.part").rename(place / f"said-{rank}.json")
os._exit(1 if said else 0)
