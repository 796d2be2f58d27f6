"""What each rank runs under torchrun: in its first life rank 1 is killed in a save. `restart_program.py PLACE`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

place, life = Path(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"]
(place / f"began-{life}-{os.environ['RANK']}").write_text(repr(time.monotonic()))  # torch takes seconds to load

import signal  # noqa: E402

import torch.distributed as dist  # noqa: E402

import tenuto  # noqa: E402
from campaigns.rank_kills.training import Numbers  # noqa: E402
from tenuto.crashpoints import armed  # noqa: E402

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def die() -> None:
    (place / "struck").write_text(repr(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


numbers = Numbers(rank, world)
point = "begun, nothing written" if (life, rank) == ("0", 1) else "save begun"
with (
    armed(point, die if (life, rank) == ("0", 1) else lambda: None),
    tenuto.Checkpointer(place / "checkpoints", numbers.state(), save=tenuto.every(steps=3)) as ckpt,
):
    for step in ckpt.steps(30 if life != "0" else 10**9):
        numbers.step(step + 1)
        time.sleep(0.01)
(place / f"ended-{rank}").write_text(str(ckpt.step))
