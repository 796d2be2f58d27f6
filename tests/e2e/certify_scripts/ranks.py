"""Two ranks, started by the first one, that train together; FAULT makes the second one's resume inexact."""

import os
import subprocess
import sys

import numpy as np

import tenuto
from tenuto.policy import every

where, meet, steps, fault = sys.argv[1], sys.argv[2], 12, sys.argv[3]
rank = int(os.environ.get("OWN_RANK", "0"))
if rank == 0:
    other = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "OWN_RANK": "1"}, start_new_session=True)

np.random.seed(7 + rank)
rows = np.zeros((4, 3))
forgotten = np.zeros(3)
state = {"rows": tenuto.shard(rows, dim=0, rank=rank, of=2), "scale": 0.5}
ranks = tenuto.SharedFiles(meet, rank=rank, world_size=2)
with tenuto.Checkpointer(where, state, save=every(steps=5), ranks=ranks, ranks_timeout=30) as ckpt:
    for step in ckpt.steps(steps):
        rows += np.random.standard_normal((4, 3)) * 0.5
        if fault == "forgets" and rank == 1:
            forgotten += 1.0
            rows += forgotten
        if fault == "clock" and rank == 1 and step >= 3:
            rows += os.getpid()
if rank == 0:
    other.wait()
