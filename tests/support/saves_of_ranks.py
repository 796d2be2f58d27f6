"""Checkpoints that several ranks have saved together, made by threads: something to look at and to look after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import tenuto
from support.rank_threads import on_ranks
from tenuto.engine.group.group_save import GroupCommit
from tenuto.engine.save.job import ManifestDetails
from tenuto.engine.save.saver import Saver
from tenuto.model.ids import CheckpointId
from tenuto.ranks.agreement import Agreement
from tenuto.repo.ownership.claim import claim
from tenuto.repo.repository import Repo
from tenuto.state.encode.flattener import Flattener

ROWS, WIDTH = 90, 40


def whole(step: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    return {
        "model": {
            "rows": rng.standard_normal((ROWS, WIDTH)).astype(np.float32),
            "columns": rng.standard_normal((6, 60, 4)),
            "bias": np.arange(7.0),
            "none": np.zeros((0, 3), np.float32),
        },
        "lr": 0.5,
    }


def held(rank: int, of: int, step: int = 0) -> dict[str, Any]:
    """What one rank holds: uneven rows of `rows`, a middle axis of `columns`, the rest as all of it, and its own."""
    model = whole(step)["model"]
    ends = np.linspace(0, ROWS, of + 1).astype(int) + np.array([0, *[3] * (of - 1), 0])
    rows, columns = slice(*ends[rank : rank + 2].tolist()), slice(60 * rank // of, 60 * (rank + 1) // of)
    return {
        "model": {
            **model,
            "rows": tenuto.shard(model["rows"][rows].copy(), whole=(ROWS, WIDTH), offsets=(rows.start, 0)),
            "columns": tenuto.shard(
                model["columns"][:, columns].copy(), whole=(6, 60, 4), offsets=(0, columns.start, 0)
            ),
        },
        "lr": 0.5,
        "seed": tenuto.per_rank({"order": np.full(3, rank), "name": f"rank {rank}"}),
    }


def save_jointly(
    repo: Repo,
    count: int = 3,
    steps: tuple[int, ...] = (1, 2),
    run: str = "main",
    *,
    session: str = "",
    holding: Callable[[int, int, int], dict[str, Any]] = held,
) -> list[CheckpointId]:
    """One attempt of a job of `count` ranks, ended; its checkpoints. `session`: what save ids are made from. `holding`:
    what a rank holds, of how many, at a step."""
    attempt = claim(repo, run, None)

    def work(agreement: Agreement) -> list[CheckpointId]:
        agreement.session.id = session or agreement.session.id
        saver = Saver(repo, run, lasting=False, protocol=GroupCommit(repo, agreement, deadline_s=60))
        saver.attempt = attempt
        saves = []
        for step in steps:
            state = holding(agreement.rank, agreement.world_size, step)
            flattened = Flattener(state, private={"mine": np.full(2, agreement.rank)}).flatten()
            about = ManifestDetails(progress={"step": step}, environment={"python": "3.11"})
            saves.append(saver.save(flattened, step, wait=True, about=about))
        for save in saves:
            save.wait(60)
        saver.close()
        return [save.id for save in saves]

    try:
        return on_ranks(count, work)[0]
    finally:
        attempt.release()
