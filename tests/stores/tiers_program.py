"""One rank of a training on memory, a disk of each node, a shared directory and a bucket:
`python tiers_program.py PLACE BUCKET STEPS RANK RANKS`. Half of the ranks are on each of two nodes. Rank 0 prints each
step, and each time the newest step that the bucket has whole."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import tenuto
from stores.training import train
from tenuto import Tier, Tiers, every, keep, on
from tenuto.events import TierLag
from tenuto.ranks.kv.shared_files import SharedFiles

FLOATS = 40_000


def main(place: Path, bucket: str, steps: int, rank: int, of: int) -> None:
    def said(event: object) -> None:
        if isinstance(event, TierLag) and event.tier == bucket and event.newest is not None:
            print(f"bucket has {event.newest.step}", flush=True)

    begin, end = (FLOATS * one // of for one in (rank, rank + 1))
    w = np.arange(FLOATS, dtype=np.float64)[begin:end].copy()
    node = f"node{2 * rank // of}"
    where = Tiers(
        Tier(place / node, per_node=True, keep=keep.latest(1)),
        Tier(place / "shared", keep=keep.latest(2)),
        Tier(bucket, save=every(steps=3) | on.end(), keep=keep.latest(3)),
        node=node,
    )
    with tenuto.Checkpointer(
        where,
        {"w": tenuto.shard(w, whole=(FLOATS,), offsets=(begin,))},
        save=every(steps=1) | on.end(),
        memory=every(steps=1),
        ranks=SharedFiles(place / "ranks", rank=rank, world_size=of),
        sinks=[said],
        log="default",
    ) as ckpt:
        for step in ckpt.steps(steps):
            train(w, step)
            ckpt.wait()
            if rank == 0:
                print(f"step {step + 1}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
