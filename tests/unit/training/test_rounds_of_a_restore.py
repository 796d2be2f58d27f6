"""How often ranks wait for each other in a load, and what they share in it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.rank_threads import together
from tenuto.engine.read import node_share
from tenuto.engine.read.node_share import NodeSharedReads
from tenuto.engine.read.peer_window import Window
from tenuto.ranks.round import Round

RANKS = 3


def state(ranks: Any, value: float) -> dict[str, Any]:
    """Rows of a matrix, each rank's own, and small values that all hold."""
    rows = np.full((1, 64 << 10), value + ranks.rank)
    steps = {str(number): tenuto.replicated(np.full(1, value)) for number in range(8)}
    return {"rows": tenuto.shard(rows, whole=(RANKS, 64 << 10), offsets=(ranks.rank, 0)), "steps": steps}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    together(RANKS, lambda ranks: tenuto.save(state(ranks, 1.0), tmp_path, step=1, ranks=ranks))
    return tmp_path


def test_a_joint_load_is_six_rounds(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of them are the restore: the choice, the match, the outcome."""
    rounds: list[str] = []
    original = Round.broadcast

    def broadcast(self: Round, data: bytes, each: Any = ()) -> None:
        rounds.append(self.name)
        original(self, data, each)

    monkeypatch.setattr(Round, "broadcast", broadcast)
    together(RANKS, lambda ranks: tenuto.load(saved, state(ranks, -1.0), ranks=ranks))
    assert rounds == ["place/0", "same place/0", "restore/0", "restore/1", "restore/2", "end/0"]


def test_the_ranks_of_a_node_know_each_other_and_need_no_window_for_small_values(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, joined, opened = threading.Lock(), [0], [0]
    join, open_window = NodeSharedReads.join, Window.open

    def counted_join(self: NodeSharedReads, request: Any, packs: Any) -> Any:
        with lock:
            joined[0] += 1
        return join(self, request, packs)

    def counted_open(self: Window, blocks: int, nbytes: int) -> None:
        with lock:
            opened[0] += 1
        open_window(self, blocks, nbytes)

    monkeypatch.setattr(NodeSharedReads, "join", counted_join)
    monkeypatch.setattr(Window, "open", counted_open)
    monkeypatch.setattr("tenuto.store.local.reader.LocalReader.view", lambda self: None)
    found = together(RANKS, lambda ranks: tenuto.load(saved, state(ranks, -1.0), ranks=ranks))
    for rank, restored in enumerate(found):
        assert set(restored.state["rows"].value.flat) == {1.0 + rank}
        assert all(one.value.tolist() == [1.0] for one in restored.state["steps"].values())
    assert (joined[0], opened[0]) == (RANKS, 0)
    monkeypatch.setattr(node_share, "WORTH_SHARING", 1)
    together(RANKS, lambda ranks: tenuto.load(saved, state(ranks, -1.0), ranks=ranks))
    assert (joined[0], opened[0]) == (2 * RANKS, RANKS)
