"""Who of several ranks writes what they hold alike: each strategy makes the same checkpoint, in its own shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

import numpy as np
import pytest

import tenuto
from support.rank_threads import on_ranks
from tenuto.api.save_load import load
from tenuto.engine.group import planning
from tenuto.engine.group.group_save import GroupCommit
from tenuto.engine.save.job import ManifestDetails
from tenuto.engine.save.saver import Saver
from tenuto.model.ids import CheckpointId
from tenuto.ranks.agreement import Agreement
from tenuto.repo.ownership.claim import claim
from tenuto.repo.repository import Repo
from tenuto.sharding.write_plan import CHUNK_BYTES, Strategy
from tenuto.state.encode.flattener import Flattener
from tenuto.state.tree import leaf_paths
from tenuto.store.memory import MemoryStore

RANKS, ROWS, WIDTH = 3, 1200, 300
PIECE_BYTES = 64 << 10
Written = dict[int, dict[str, list[int]]]
"""By rank and path the bytes of each part."""


def whole() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    layers = {
        f"{number}": {"w": rng.standard_normal((ROWS, WIDTH)).astype(np.float32), "b": rng.standard_normal(WIDTH)}
        for number in range(4)
    }
    return {"layers": layers, "table": rng.standard_normal((ROWS, WIDTH)), "step": 7}


def held(rank: int) -> dict[str, Any]:
    """All of the layers on every rank, and a third of the table."""
    state, rows = whole(), ROWS // RANKS
    table = state["table"][rank * rows : (rank + 1) * rows].copy()
    return {
        **state,
        "layers": tenuto.replicated(state["layers"]),
        "table": tenuto.shard(table, whole=(ROWS, WIDTH), offsets=(rank * rows, 0)),
    }


def saved(repo: Repo, strategy: Strategy) -> CheckpointId:
    attempt = claim(repo, "main", None)

    def work(agreement: Agreement) -> CheckpointId:
        protocol = GroupCommit(repo, agreement, strategy=strategy, deadline_s=60)
        saver = Saver(repo, "main", lasting=False, protocol=protocol)
        saver.attempt = attempt
        save = saver.save(
            Flattener(held(agreement.rank)).flatten(), 7, wait=True, about=ManifestDetails(progress={"step": 7})
        )
        save.wait(60)
        saver.close()
        return save.id

    try:
        return on_ranks(RANKS, work)[0]
    finally:
        attempt.release()


def written(repo: Repo, id: CheckpointId) -> Written:
    """Of the indexes, which say what lies in whose packs."""
    manifest = repo.manifest(id)
    paths = leaf_paths(manifest.tree)
    found: Written = {}
    for rank in range(RANKS):
        index, mine = repo.index(manifest, rank), found.setdefault(rank, {})
        assert index.leaf is not None
        for leaf, nbytes in zip(index.leaf.tolist(), index.length.tolist(), strict=True):
            mine.setdefault(paths[leaf], []).append(nbytes)
    return found


def replicas_by(found: Written) -> Mapping[int, int]:
    """Bytes of the layers, by who has written them."""
    return {
        rank: sum(sum(parts) for path, parts in mine.items() if path.startswith("layers"))
        for rank, mine in found.items()
    }


def writers_of(found: Written, path: str) -> list[int]:
    return [rank for rank, mine in found.items() if any(one.startswith(path) for one in mine)]


def balanced(found: Written) -> None:
    shares = replicas_by(found)
    assert max(shares.values()) - min(shares.values()) < 2 * CHUNK_BYTES, shares
    assert any(len(writers_of(found, f"layers/{number}/w")) > 1 for number in range(4)), "large ones are cut"


def layer(found: Written) -> None:
    by_layer = [writers_of(found, f"layers/{number}") for number in range(4)]
    assert [len(ranks) for ranks in by_layer] == [1] * 4, by_layer
    assert {rank for ranks in by_layer for rank in ranks} == {0, 1, 2}


def tensor(found: Written) -> None:
    for path in (f"layers/{number}/{name}" for number in range(4) for name in "wb"):
        (rank,) = writers_of(found, path)
        assert len(found[rank][path]) == 1, path
    assert len({rank for rank, nbytes in replicas_by(found).items() if nbytes}) == RANKS


def size(found: Written) -> None:
    parts = [nbytes for mine in found.values() for each in mine.values() for nbytes in each]
    assert max(parts) <= PIECE_BYTES
    assert all(len(mine["table"]) > 1 for mine in found.values()), "what one rank alone holds is cut too"
    assert max(replicas_by(found).values()) - min(replicas_by(found).values()) <= 2 * PIECE_BYTES


def one(found: Written) -> None:
    shares = replicas_by(found)
    assert shares[0] == sum(value.nbytes for each in whole()["layers"].values() for value in each.values())
    assert (shares[1], shares[2]) == (0, 0)
    assert writers_of(found, "table") == [0, 1, 2], "nobody else holds it"


SAYS: dict[str, Callable[[Written], None]] = {
    "balanced": balanced, "layer": layer, "tensor": tensor, "size": size, "one": one,
}  # fmt: skip


@pytest.mark.parametrize("strategy", get_args(Strategy))
def test_each_strategy_shares_out_what_is_written_as_it_says(
    monkeypatch: pytest.MonkeyPatch, strategy: Strategy
) -> None:
    monkeypatch.setattr(planning, "PIECE_BYTES", PIECE_BYTES)
    repo = Repo.create_or_open(MemoryStore(f"strategy {strategy}"))
    id = saved(repo, strategy)
    found = written(repo, id)
    SAYS[strategy](found)
    assert sum(sum(parts) for mine in found.values() for parts in mine.values()) == sum(
        value.nbytes for value in [whole()["table"], *(v for each in whole()["layers"].values() for v in each.values())]
    )
    restored = load(repo.store).state
    assert restored["step"] == 7 and np.array_equal(restored["table"], whole()["table"])
    for number, each in whole()["layers"].items():
        assert all(np.array_equal(restored["layers"][number][name], value) for name, value in each.items()), number


def test_by_one_rank_means_that_the_others_write_no_tensor() -> None:
    """Of a state that all hold: as data parallelism has it."""
    repo = Repo.create_or_open(MemoryStore("strategy one, replicas"))
    attempt = claim(repo, "main", None)

    def work(agreement: Agreement) -> CheckpointId:
        saver = Saver(repo, "main", lasting=False, protocol=GroupCommit(repo, agreement, strategy="one", deadline_s=60))
        saver.attempt = attempt
        save = saver.save(Flattener({"w": np.arange(5000.0)}).flatten(), 1, wait=True, about=ManifestDetails())
        save.wait(60)
        saver.close()
        return save.id

    try:
        id = on_ranks(RANKS, work)[0]
    finally:
        attempt.release()
    assert {rank: sum(map(sum, mine.values())) for rank, mine in written(repo, id).items()} == {0: 40_000, 1: 0, 2: 0}
    assert np.array_equal(load(repo.store).state["w"], np.arange(5000.0))
