"""What a Checkpointer of several ranks is told before it meets the others, and how long it waits for them."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.rank_threads import together
from tenuto import every, keep, on
from tenuto.engine.group.group import session_settings
from tenuto.errors import RankFailed, RanksDisagree, RanksError, RanksMissing, RankStoreLost, StateMismatch, UsageError
from tenuto.model.ids import CheckpointId
from tenuto.policy.save import Moment, SaveHistory, SavePolicy
from tenuto.ranks.kv.in_process import InProcessKVStore, ThreadRanks
from tenuto.ranks.round import Round
from tenuto.repo.ownership.claim import Attempt, claim


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), True, "600"])
def test_a_time_to_wait_that_makes_no_sense_is_refused(tmp_path: Path, timeout: Any) -> None:
    with pytest.raises(UsageError, match="ranks_timeout="):
        tenuto.Checkpointer(tmp_path, {"w": np.ones(3)}, ranks_timeout=timeout)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_wait_no_longer_for_one_that_never_comes(tmp_path: Path, rank: int) -> None:
    ranks = ThreadRanks(rank, 2, InProcessKVStore())
    with pytest.raises(RanksMissing, match=f"rank {1 - rank}") as raised:
        tenuto.Checkpointer(tmp_path, {"w": np.ones(3)}, ranks=ranks, ranks_timeout=0.2)
    assert raised.value.ranks == (1 - rank,) and raised.value.phase == "handshake"


def test_who_is_dead_is_found_out_before_the_time_to_wait_is_over() -> None:
    assert session_settings(600.0).dead_after_s == 15.0 and session_settings(600.0).beat_s == 1.0
    for timeout_s in (1.0, 10.0, 100.0):
        found = session_settings(timeout_s)
        assert found.dead_after_s <= timeout_s / 2 and found.beat_s <= found.dead_after_s / 10


def test_what_is_raised_after_the_ranks_have_met_is_told_to_the_others(tmp_path: Path) -> None:
    """`data` is judged after the meeting: the other rank must not wait for this one until its time is over."""

    kv_store, found = InProcessKVStore(), {}

    def build(rank: int) -> None:
        try:
            with tenuto.Checkpointer(
                tmp_path,
                {"w": np.ones(3)},
                ranks=ThreadRanks(rank, 2, kv_store),
                ranks_timeout=60.0,
                data=1.5 if rank else None,
            ) as ckpt:
                ckpt.save(wait=True)
        except BaseException as error:  # noqa: BLE001 - told to the test
            found[rank] = error

    threads = [threading.Thread(target=build, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert isinstance(found[1], UsageError)
    assert isinstance(found[0], RankFailed) and "yields batches, not float" in str(found[0])


class OfOnesOwn(SavePolicy):
    def wants(self, now: Moment, history: SaveHistory) -> str | None:
        return None


@pytest.mark.parametrize(
    ("name", "values", "shown"),
    [
        ("save", (every(steps=3), every(steps=4)), ("every(steps=3)", "every(steps=4)")),
        ("save", (OfOnesOwn() | every(steps=3), every(steps=3)), (f"<{__name__}.OfOnesOwn object> | ev", "every(")),
        ("keep", (None, keep.latest(2)), ("keep.latest(3)", "keep.latest(2)")),
        ("memory", (None, every(steps=2)), ("None", "every(steps=2)")),
        ("resume_from", ("latest", None), ("latest", "None")),
        ("in_flight", (1, 2), ("1", "2")),
        ("on_busy", ("wait", "skip"), ("wait", "skip")),
        ("capture", ("fenced", "eager"), ("fenced", "eager")),
    ],
    ids=["save", "a policy of one's own", "keep", "memory", "resume_from", "in_flight", "on_busy", "capture"],
)
def test_ranks_whose_arguments_differ_are_told_so_when_they_meet(
    tmp_path: Path, name: str, values: tuple[Any, Any], shown: tuple[str, str]
) -> None:
    def build(ranks: Any) -> Any:
        given: Any = {name: values[ranks.rank]}
        return tenuto.Checkpointer(tmp_path, {"w": np.ones(3)}, ranks=ranks, ranks_timeout=30.0, **given)

    for error in together(2, build):
        assert isinstance(error, RanksDisagree) and error.ranks == (0, 1), error
        said = re.search(rf"{name} is '(.*)' on rank 0 \(.*\) and '(.*)' on rank 1 \(.*\)", error.message)
        assert said is not None and all(map(str.startswith, said.groups(), shown)), error.message
    assert not list(tmp_path.iterdir())


def test_policies_of_ones_own_that_read_alike_are_alike(tmp_path: Path) -> None:
    def build(ranks: Any) -> int:
        save = OfOnesOwn() | on.end()
        with tenuto.Checkpointer(tmp_path, {"w": np.ones(3)}, ranks=ranks, ranks_timeout=30.0, save=save) as ckpt:
            return len(list(ckpt.steps(2)))

    assert together(2, build) == [2, 2]


def test_a_claim_that_cannot_be_announced_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kv_store, found, announce = InProcessKVStore(), {}, Round.broadcast

    def announcing(round: Round, data: bytes, each: Any = ()) -> None:
        if round.kind == "claim":
            raise RankStoreLost("the board does not answer")
        announce(round, data, each)

    def build(rank: int) -> None:
        try:
            ranks = ThreadRanks(rank, 2, kv_store)
            with tenuto.Checkpointer(tmp_path, {"w": np.ones(3)}, ranks=ranks, ranks_timeout=20.0) as ckpt:
                ckpt.save(wait=True)
        except BaseException as error:  # noqa: BLE001 - told to the test
            found[rank] = error

    with monkeypatch.context() as patched:
        patched.setattr(Round, "broadcast", announcing)
        threads = [threading.Thread(target=build, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert isinstance(found[0], RankStoreLost) and isinstance(found[1], RanksError)
    with tenuto.Checkpointer(tmp_path, {"w": np.ones(3)}, ranks=tenuto.Solo()) as ckpt:
        assert ckpt.save(wait=True).committed, "nobody has the run"


def test_a_restore_that_all_ranks_have_refused_is_refused_again_when_it_is_tried_again(tmp_path: Path) -> None:
    """Nobody waits for what another has said before, nor hears it."""
    tenuto.save({"model": {"a": np.ones(3), "b": np.ones(2)}}, tmp_path)
    kv_store, found = InProcessKVStore(), {}

    def build(rank: int) -> None:
        state = {"model": {"a": np.zeros(3)}}
        found[rank] = said = []
        try:
            with tenuto.Checkpointer(tmp_path, state, ranks=ThreadRanks(rank, 2, kv_store), ranks_timeout=20.0) as ckpt:
                for _ in range(3):
                    try:
                        ckpt.restore()
                    except StateMismatch as error:
                        said.append(error.message)
        except BaseException as error:  # noqa: BLE001 - told to the test
            said.append(repr(error))

    threads = [threading.Thread(target=build, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found[0] == found[1] and len(found[0]) == 3, found
    assert all("model/b" in one for one in found[0])


def test_i4_all_ranks_go_on_from_what_was_committed_while_one_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    for step in (1, 2):
        tenuto.save({"w": np.full(3, float(step))}, place, step=step)
    last = place / "runs/main/a0001/step-00000002"
    shutil.move(last, tmp_path / "not yet committed")

    def meanwhile(*words: Any, before_put: Callable[[], None], **options: Any) -> Attempt:
        def committing() -> None:
            before_put()
            if not last.exists():
                shutil.move(tmp_path / "not yet committed", last)

        return claim(*words, before_put=committing, **options)

    monkeypatch.setattr("tenuto.repo.ownership.claim.claim", meanwhile)
    kv_store, found = InProcessKVStore(), {}

    def build(rank: int) -> None:
        state = {"w": np.zeros(3)}
        ranks = ThreadRanks(rank, 2, kv_store)
        with tenuto.Checkpointer(place, state, ranks=ranks, ranks_timeout=60.0) as ckpt:
            ckpt.restore()
            ckpt.save(wait=True)
        found[rank] = float(state["w"][0])

    threads = [threading.Thread(target=build, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == {0: 2.0, 1: 2.0}
    assert tenuto.Repository(place).repo.attempt("main", 3).parent == CheckpointId("main", 1, 2)
