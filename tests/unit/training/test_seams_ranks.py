"""What a trainer's adapter is built from, on several ranks: all look at one checkpoint, fill what came late, and are
given what only the first rank knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.memory_training import shared_memory
from support.rank_threads import together
from tenuto import every, keep
from tenuto.errors import ShardMismatch, StateError, UsageError


class Counts:
    """An object whose state is gathered by all ranks, as a sharded one's would be."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.asked = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"value": self.value, "array": np.full(3, self.value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        self.array = state["array"]


def trained(where: Path, ranks: int = 2, steps: int = 2) -> None:
    def work(job: Any) -> None:
        state = {"w": np.arange(6.0), "trainer": {"best": 0.5}, "own": tenuto.per_rank({"seed": job.rank})}
        with tenuto.Checkpointer(where, state, ranks=job, save=every(steps=1), keep=keep.all(), log="silent") as ckpt:
            ckpt.restore()
            for _ in range(steps):
                state["w"] += 1
                ckpt.step_done()

    raised(together(ranks, work))


def raised(outcomes: Any) -> Any:
    for one in outcomes:
        if isinstance(one, BaseException):
            raise one
    return outcomes


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_peek_at_the_checkpoint_that_they_restore(tmp_path: Path, ranks: int) -> None:
    trained(tmp_path)

    def work(job: Any) -> Any:
        state: dict[str, Any] = {"w": np.zeros(6), "trainer": tenuto.late(), "own": tenuto.late()}
        with tenuto.Checkpointer(tmp_path, state, ranks=job, log="silent") as ckpt:
            opened = ckpt.peek()
            assert opened is not None
            seen = opened.step, opened.plain("trainer"), opened["w"].numpy().tolist()
            ckpt.restore()
            state["trainer"], state["own"] = {"best": 0.0}, tenuto.per_rank({"seed": -1})
            ckpt.restore()
            ckpt.step_done()
            return *seen, state["w"].tolist(), state["trainer"]["best"], state["own"].value["seed"]

    for rank, found in enumerate(raised(together(ranks, work))):
        values = [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
        assert found[:5] == (2, {"best": 0.5}, values, values, 0.5)
        assert found[5] == (rank if ranks == 2 else -1)


def test_damage_in_one_ranks_share_is_passed_over_by_all(tmp_path: Path) -> None:
    trained(tmp_path)
    pack = max((path for path in tmp_path.rglob("step-00000002/*.safetensors")), key=lambda path: path.stat().st_size)
    data = bytearray(pack.read_bytes())
    data[-8] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(bytes(data))

    def work(job: Any) -> Any:
        state = {"w": np.zeros(6), "trainer": {}, "own": tenuto.per_rank({})}
        with tenuto.Checkpointer(tmp_path, state, ranks=job, log="silent") as ckpt:
            opened = ckpt.peek()
            restored = ckpt.restore()
            assert opened is not None
            assert restored is not None
            return opened.step, restored.step

    assert raised(together(2, work)) == [(1, 1), (1, 1)]


def test_counting_is_refused_on_all_ranks_while_an_entry_is_late(tmp_path: Path) -> None:
    trained(tmp_path)

    def work(job: Any) -> None:
        state: dict[str, Any] = {"w": np.zeros(6), "trainer": tenuto.late(), "own": tenuto.per_rank({})}
        with tenuto.Checkpointer(tmp_path, state, ranks=job, log="silent") as ckpt:
            ckpt.restore()
            ckpt.step_done()

    for outcome in together(2, work):
        assert isinstance(outcome, UsageError), outcome
        assert "'trainer' of the state is still late" in str(outcome)


@pytest.mark.parametrize("readers", [1, 2, 3])
def test_of_what_ranks_keep_apart_the_first_ranks_counts(tmp_path: Path, readers: int) -> None:
    def save(job: Any) -> int:
        counts = Counts(job.rank + 7)
        best = {"best": 0.5 + job.rank, "scores": [np.full(2, float(job.rank)), "a" * (job.rank + 1)]}
        state = {"w": np.ones(4), "counts": tenuto.first_rank(counts), "deep": {"best": tenuto.first_rank(best)}}
        for step in (1, 2):
            counts.value += 10
            tenuto.save(state, tmp_path, step=step, ranks=job)
        return counts.asked

    assert raised(together(2, save)) == [2, 2], "a state_dict may be a collective"

    def load(job: Any) -> Any:
        counts = Counts(0)
        best: dict[str, Any] = {"best": 0.0, "scores": [np.zeros(2), ""]}
        state = {"w": np.zeros(4), "counts": tenuto.first_rank(counts), "deep": {"best": tenuto.first_rank(best)}}
        tenuto.load(tmp_path, state, ranks=job)
        return counts.value, counts.array.tolist(), best["best"], best["scores"][0].tolist(), best["scores"][1]

    assert raised(together(readers, load)) == [(27, [27] * 3, 0.5, [0, 0], "a")] * readers
    plain = tenuto.load(tmp_path).state
    assert plain["deep"]["best"]["best"] == 0.5, "a mark is no part of the checkpoint"


def test_a_first_ranks_entry_is_declared_by_all(tmp_path: Path) -> None:
    def save(job: Any) -> None:
        value = {"best": 0.5}
        tenuto.save({"trainer": tenuto.first_rank(value) if job.rank else {"best": 0.25}}, tmp_path, ranks=job)
        assert tenuto.load(tmp_path, ranks=job).state == {"trainer": {"best": 0.25}}

    raised(together(2, save))

    def wrong(job: Any) -> None:
        value = {"best": 0.5 + job.rank}
        tenuto.save({"trainer": value if job.rank == 1 else tenuto.first_rank(value)}, tmp_path, ranks=job)

    first = together(3, wrong)[0]
    assert isinstance(first, ShardMismatch), first
    assert "trainer is declared as the first rank's on rank 2" in str(first)


def in_memory(job: Any, value: float, *more: tuple[str, Any]) -> dict[str, Any]:
    table = tenuto.shard(np.full(4, value + job.rank), whole=(8,), offsets=(4 * job.rank,))
    return {"table": table, "n": 0, "own": tenuto.per_rank({"seed": job.rank}), **dict(more)}


def left_in_memory(where: Path, *more: tuple[str, Any]) -> None:
    """Two ranks that are stopped at step 3, the last of the store being step 2."""

    def work(job: Any) -> None:
        state = in_memory(job, 0.0, *more)
        ckpt = tenuto.Checkpointer(where, state, ranks=job, save=every(steps=2), memory=every(steps=1), log="silent")
        ckpt.restore()
        for step in (1, 2, 3):
            state["n"] = step
            state["table"].value[:] += 1
            ckpt.step_done()
        ckpt.close(failed=KeyboardInterrupt())

    raised(together(2, work))


def test_ranks_peek_at_what_they_left_in_memory(tmp_path: Path) -> None:
    def work(job: Any) -> Any:
        state = in_memory(job, -1.0)
        with tenuto.Checkpointer(tmp_path, state, ranks=job, memory=every(steps=1), log="silent") as ckpt:
            opened = ckpt.peek()
            assert opened is not None
            with pytest.raises(StateError, match="only plain values"):
                opened["table"].numpy()
            seen = opened.step, opened.plain("n"), state["n"]
            restored = ckpt.restore()
            assert restored is not None
            assert restored.memory_s is not None
            return *seen, state["n"], state["table"].value.tolist()

    with shared_memory():
        left_in_memory(tmp_path)
        assert raised(together(2, work)) == [(3, 3, 0, 3, [3.0 + rank] * 4) for rank in (0, 1)]


def test_with_a_first_ranks_entry_ranks_resume_from_the_store(tmp_path: Path) -> None:
    def work(job: Any) -> Any:
        state = in_memory(job, -1.0, ("trainer", tenuto.first_rank({"best": 0.0})))
        with tenuto.Checkpointer(tmp_path, state, ranks=job, memory=every(steps=1), log="silent") as ckpt:
            restored = ckpt.restore()
            assert restored is not None
            return restored.step, restored.memory_s, state["trainer"].value

    with shared_memory():
        left_in_memory(tmp_path, ("trainer", tenuto.first_rank({"best": 0.5})))
        assert raised(together(2, work)) == [(2, None, {"best": 0.5})] * 2
