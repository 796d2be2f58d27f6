"""What one process can do, done by several ranks: saves through a window, a share of the time, a metric that drops."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.rank_threads import together
from tenuto import every, keep, on
from tenuto.engine.group import group
from tenuto.events import Committed, Event, SaveStarted, Warned
from tenuto.maintenance.verify import assert_whole
from tenuto.policy.save import SavePolicy
from tenuto.ranks.contract import Settings
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store
from tenuto.telemetry import heartbeat

MIB = 1 << 20
PATIENCE_S = 60.0


class Seen:
    """`reasons`: why saves were begun, by step."""

    def __init__(self) -> None:
        self.reasons: dict[int, str] = {}
        self.committed: list[int] = []
        self.warned: list[str] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, SaveStarted):
            self.reasons[event.id.step] = event.reason
        if isinstance(event, Committed):
            self.committed.append(event.id.step)
        if isinstance(event, Warned):
            self.warned.append(event.message)


def raised(found: Any) -> Any:
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


# -- through a window --------------------------------------------------------------------------------------------------


def test_i9_each_rank_saves_a_share_beyond_its_budget_piece_by_piece(tmp_path: Path) -> None:
    """At most a quarter of what a rank writes is in memory at a time; after a restart too, when memory is taken before
    it is planned who writes what."""
    whole = np.random.default_rng(3).random((2 * 4 * MIB // 8 // 64, 64))

    def work(ranks: Any, total: int) -> Seen:
        begin, end = (len(whole) * rank // ranks.world_size for rank in (ranks.rank, ranks.rank + 1))
        held = whole[begin:end].copy() if total == 2 else np.zeros_like(whole[begin:end])
        small = {str(number): np.full(number + 1, float(number)) for number in range(50)}
        state = {"w": tenuto.shard(held, whole=whole.shape, offsets=(begin, 0)), "small": small}
        seen = Seen()
        with tenuto.Checkpointer(
            tmp_path,
            state,
            save=every(steps=1),
            keep=keep.all(),
            memory_budget=MIB,
            on_error="raise",
            ranks=ranks,
            ranks_timeout=PATIENCE_S,
            sinks=[seen],
        ) as ckpt:
            for _ in ckpt.steps(total):
                held += 1
        return seen

    for total in (2, 3):
        for seen in raised(together(2, lambda ranks, total=total: work(ranks, total))):
            assert any("goes out through 1.0 MiB" in message for message in seen.warned), seen.warned
            assert seen.committed == [1, 2] if total == 2 else [3]
    for step in (2, 3):
        state = tenuto.load(tmp_path, step=step).state
        assert np.array_equal(state["w"], sum([1] * step, whole))
        assert all(np.array_equal(value, np.full(int(name) + 1, float(name))) for name, value in state["small"].items())
    assert_whole(Repo.open(open_store(tmp_path)))


# -- what the first rank decides for all -------------------------------------------------------------------------------


def train(
    place: Path,
    save: SavePolicy,
    think: Callable[[Seen], float | None],
    meddle: Callable[[Any, int, Seen], None] = lambda spent, rank, seen: None,
) -> list[Seen]:
    """Two ranks, which begin each step together, as training's own collectives see to. Before each, `think` says which
    loss the first one logs (the other logs one that halves), or, by None, that it is the last. Each rank may `meddle`
    with what saves have cost it."""
    seen: list[Seen] = [Seen(), Seen()]
    now: list[float | None] = [None]

    def decide() -> None:
        now[0] = think(seen[0])

    barrier = threading.Barrier(2, decide, timeout=PATIENCE_S)

    def work(ranks: Any) -> None:
        with tenuto.Checkpointer(
            place,
            {"w": np.ones(3)},
            save=save,
            keep=keep.all(),
            on_error="raise",
            ranks=ranks,
            ranks_timeout=PATIENCE_S,
            sinks=[seen[ranks.rank]],
        ) as ckpt:
            for step in ckpt.steps():
                barrier.wait()
                if now[0] is None:
                    ckpt.stop()
                else:
                    ckpt.log(loss=now[0] if ranks.rank == 0 else 0.5 ** min(step, 900))
                meddle(ckpt._training.saving.totals, ranks.rank, seen[0])  # type: ignore[union-attr]

    def working(ranks: Any) -> None:
        try:
            work(ranks)
        except BaseException:
            barrier.abort()
            raise

    raised(together(2, working))
    assert seen[0].reasons == seen[1].reasons
    assert seen[0].committed == seen[1].committed == sorted(seen[0].reasons)
    return seen


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that agree on a step soon."""
    soon = Settings(beat_s=0.01, dead_after_s=PATIENCE_S / 2, answer_s=10)
    monkeypatch.setattr(group, "session_settings", lambda timeout_s, silence_s: soon)


def test_a_metric_that_drops_on_the_first_rank_saves_on_all(tmp_path: Path) -> None:
    logged: list[float] = []

    def think(seen: Seen) -> float | None:
        """1 until a save is there; then three times what is no drop by 5 %; then one that is, until it is saved."""
        saved = len(seen.committed)
        if saved == 2:
            return None
        logged.append(1.0 if saved == 0 else 0.97 if logged.count(0.97) < 3 else 0.9)
        return logged[-1]

    seen = train(tmp_path, on.drop("loss", by="5%"), think)[0]
    assert list(seen.reasons.values()) == [
        "the first loss (1)",
        "loss dropped from 1 at the last save to 0.9",
        "stop() was called",
    ]
    assert logged.count(0.97) == 3
    metrics = []
    for step in seen.committed[:2]:
        with tenuto.open(tmp_path, step=step) as opened:
            metrics.append(dict(opened.metrics))
    assert metrics == [{"loss": 1.0}, {"loss": 0.9}]


def test_a_share_of_the_first_ranks_time_says_when_all_save(tmp_path: Path) -> None:
    """The other rank's saves have cost it years: by itself it would save no more. When the first one's have, no rank
    does."""
    steps_after: list[int] = []

    def meddle(spent: Any, rank: int, seen: Seen) -> None:
        if rank == 1 or len(seen.committed) >= 4:
            spent._stalled_before_s = 1e9

    def think(seen: Seen) -> float | None:
        if len(seen.committed) >= 4:
            steps_after.append(len(seen.committed))
        return None if len(steps_after) > 500 else 1.0

    seen = train(tmp_path, every(stall="50%"), think, meddle)[0]
    first, *more = seen.reasons.values()
    assert first == "the first save shows what a save costs (every stall=50%)"
    bearing = [reason for reason in more if "since the last save bear another" in reason]
    assert 3 <= len(bearing) <= 4, "one may have been wished for before"
    assert more in (bearing, [*bearing, "stop() was called"])


def test_where_the_first_rank_finds_nan_all_stop_at_one_step_and_save_it(tmp_path: Path) -> None:
    until_s, over = time.monotonic() + PATIENCE_S, list[bool]()

    def look() -> None:
        """Ends what nobody stops: in time, since how many steps pass until all agree is the machine's affair."""
        if time.monotonic() > until_s:
            over.append(True)

    barrier = threading.Barrier(2, look, timeout=PATIENCE_S)

    def work(ranks: Any) -> int:
        with tenuto.Checkpointer(
            tmp_path,
            {"w": np.ones(3)},
            save=every(steps=100_000),
            on_unhealthy="stop",
            ranks=ranks,
            ranks_timeout=PATIENCE_S,
            log="silent",
        ) as ckpt:
            for step in ckpt.steps():
                barrier.wait()
                assert not over, "nobody stops"
                ckpt.log(loss=np.nan if step >= 5 and ranks.rank == 0 else 1.0)
        return ckpt.step

    one, other = raised(together(2, work))
    assert one == other and one > 5
    assert tenuto.Repository(tmp_path).latest_step() == one


@pytest.mark.parametrize("taker", [0, 1])
def test_a_save_that_a_supervisor_asks_one_rank_for_is_of_one_step_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taker: int
) -> None:
    (tmp_path / "beats").mkdir()
    monkeypatch.setenv(heartbeat.VARIABLE, str(tmp_path / "beats"))
    take = heartbeat.Heartbeat.save_request
    monkeypatch.setattr(
        heartbeat.Heartbeat, "save_request", lambda beats: take(beats) if beats._rank == taker else None
    )
    asked: list[int] = []

    def think(seen: Seen) -> float | None:
        if not asked:
            asked.append(1)
            heartbeat.request_save(tmp_path / "beats", "memory: 1 GiB left")
        return None if seen.committed else 1.0

    seen = train(tmp_path / "ck", every(steps=100_000), think)[0]
    assert list(seen.reasons.values()) == ["memory: 1 GiB left", "stop() was called"]
    assert not (tmp_path / "beats" / heartbeat.REQUEST_FILE).exists()
