"""What saves find of the values that they write, and what follows: marks, retention, `best`, warnings, callbacks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.rank_threads import together
from tenuto import every, keep
from tenuto.cli import main
from tenuto.engine.save import health as module
from tenuto.errors import CheckpointNotFound, CorruptionError, UsageError
from tenuto.maintenance.verify import assert_whole
from tenuto.model.health import Health
from tenuto.repo.format.leaf_statistics import decode
from tenuto.repo.keys import unlock
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

NAN, INF = math.nan, math.inf


def train(
    place: Any, state: dict[str, Any], total: int, bad: Any = lambda step: None, **more: Any
) -> tenuto.Repository:
    """Trains to step `total`, with `bad(step)` inside each, and a save at its end."""
    more = {"save": every(steps=1), "keep": keep.all(), "log": "silent"} | more
    with tenuto.Checkpointer(place, state, **more) as ckpt:
        for step in ckpt.steps(total):
            bad(step + 1)
    found = tenuto.Repository(place)
    assert_whole(found.repo)
    return found


def leaves(found: Any) -> dict[str, Any]:
    return {leaf.path: leaf for leaf in found.leaves}


def test_a_save_has_statistics_of_each_leaf_and_of_all(tmp_path: Path) -> None:
    state = {"w": np.array([3.0, -4.0], np.float32), "steps": np.array([1, 2]), "text": "a", "none": np.zeros(0)}
    found = train(tmp_path, state, 1).health()
    w, steps, none = (leaves(found)[name] for name in ("w", "steps", "none"))
    assert (w.norm, w.min, w.max, w.sampled, w.nonfinite) == (5.0, -4.0, 3.0, 1.0, 0)
    assert (steps.min, steps.max) == (1.0, 2.0) and none.norm is None
    assert found.health is not None and found.health.norm == 5.0, "of floating-point leaves alone"
    assert found.health.healthy and str(found.health) == "" and found.health.changed is None


@pytest.mark.parametrize("count", [3, 100_000])
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e4m3fnuz", "complex64", "float64"])
def test_leaves_of_every_type_short_or_long_have_statistics(tmp_path: Path, name: str, count: int) -> None:
    torch = pytest.importorskip("torch")
    w = torch.full((count,), 2.0).to(getattr(torch, name))
    repo = train(tmp_path, {"w": w, "v": torch.full((count,), NAN).to(getattr(torch, name))}, 1)
    found = repo.health()
    one = leaves(found)["w"]
    assert one.norm == pytest.approx(2 * math.sqrt(count), rel=1e-5) and one.nonfinite == 0
    assert found.health is not None and found.health.norm == pytest.approx(one.norm, rel=1e-5)
    assert (found.health.paths, leaves(found)["v"].nan) == (("v",), count)


def test_how_much_has_changed_since_the_save_before(tmp_path: Path) -> None:
    state = {"a": np.zeros(1 << 18), "b": np.zeros(1 << 18)}

    def change(step: int) -> None:
        state["a"][: step * 100] += 1

    found = train(tmp_path, state, 2, change).health()
    assert found.health is not None and found.health.changed == pytest.approx(1 / 16, rel=1e-2)
    assert leaves(found)["a"].changed == 0.125 and leaves(found)["b"].changed == 0.0


@pytest.mark.parametrize("encoding", ["plain", "dedupe", "small"])
def test_a_leaf_that_becomes_nan_makes_it_unhealthy_until_it_is_finite(tmp_path: Path, encoding: Any) -> None:
    state = {"w": np.zeros(100_000, np.float32), "b": np.zeros(3), "mask": np.array([0.0, -INF])}

    def spoil(step: int) -> None:
        state["w"][7] = NAN if step in (2, 3) else 0

    repo = train(tmp_path, state, 4, spoil, encoding=encoding)
    found = {id.step: repo.health(id) for id in repo.checkpoints()}
    assert [found[step].health.leaves for step in (1, 2, 3, 4)] == [0, 1, 1, 0]
    assert found[3].health.paths == ("w",) and "1 leaf with NaN or infinities (w)" in str(found[3].health)
    assert (leaves(found[3])["w"].nonfinite, leaves(found[3])["w"].nan) == (1, 1)
    assert found[1].health.nonfinite == 1, "of the mask, which has always been so"
    assert leaves(found[3])["mask"].usual and not leaves(found[3])["w"].usual


def test_a_mask_and_a_nan_are_known_from_the_checkpoint_that_training_resumes_from(tmp_path: Path) -> None:
    state = {"w": np.zeros(3), "v": np.zeros(3), "mask": np.array([0.0, -INF])}

    def spoil(step: int) -> None:
        state["w"][0] = NAN
        state["v"][0] = 0 if step == 1 else INF

    train(tmp_path, state, 1, spoil)
    found = train(tmp_path, state, 2, spoil).health()
    assert found.health is not None and set(found.health.paths) == {"w", "v"}
    assert leaves(found)["mask"].usual


def test_leaves_that_come_later_are_judged_as_in_a_first_save(tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": np.zeros(3), "mask": np.array([-INF])}

    def grow(step: int) -> None:
        if step == 2:
            state["new"] = np.array([-INF])
            state["broken"] = np.array([NAN])

    found = train(tmp_path, state, 3, grow).health()
    assert found.health is not None and found.health.paths == ("broken",)
    assert leaves(found)["new"].usual and leaves(found)["mask"].usual


def test_buffers_that_nothing_fills_are_usual_and_parameters_never(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 2)
    model.register_buffer("junk", torch.tensor([NAN, 1.0]))
    model.bias.data[0] = INF
    found = train(tmp_path, {"model": model}, 1).health()
    assert found.health is not None and found.health.paths == ("model/bias",)


def test_without_health_nothing_is_looked_at(tmp_path: Path) -> None:
    found = train(tmp_path, {"w": np.full(3, NAN)}, 1, health=False).health()
    assert found.health is None and found.leaves == ()


def test_a_sealed_checkpoint_says_the_sum_and_nothing_of_single_leaves(tmp_path: Path) -> None:
    where, key = tmp_path / "ckpts", tmp_path / "key"
    with tenuto.Checkpointer(where, {"w": np.zeros(1)}, save=every(steps=1)):
        pass
    with pytest.raises(SystemExit) as left:
        main(["key", "add", str(where), "--key-file", str(key)])
    assert not left.value.code
    state = {"w": np.array([3.0, 4.0, NAN])}
    with tenuto.Checkpointer(where, state, save=every(steps=1), key=key, log="silent") as ckpt:
        for _ in ckpt.steps(1):
            pass
    found = tenuto.Repository(where)
    assert found.manifest(found.find()).health == Health(1, ("w",), 1, 5.0, None)
    unlock(found.repo, key)
    assert found.health().leaves == ()
    with tenuto.Checkpointer(where, state, save=every(steps=1), key=key, log="silent") as ckpt:
        for _ in ckpt.steps(3):
            state["mask"] = np.array([-INF])
    newest = found.manifest(found.find()).health
    assert newest is not None and (newest.paths, newest.nonfinite) == (("w",), 2)


def test_each_rank_looks_at_what_it_writes_and_the_manifest_has_the_sum(tmp_path: Path) -> None:
    def work(ranks: Any) -> None:
        held = np.full((4, 8), 1.0)
        if ranks.rank == 1:
            held[0, 0] = NAN
        state = {"w": tenuto.shard(held, whole=(8, 8), offsets=(4 * ranks.rank, 0)), "same": np.ones(4)}
        with tenuto.Checkpointer(tmp_path, state, save=every(steps=1), ranks=ranks, ranks_timeout=60.0) as ckpt:
            for _ in ckpt.steps(2):
                held += 1

    for one in together(2, work):
        assert one is None, one
    found = tenuto.Repository(tmp_path).health()
    assert found.health is not None and (found.health.leaves, found.health.paths) == (1, ("w",))
    assert found.health.norm == pytest.approx(math.sqrt(63 * 9 + 4))
    assert {leaf.rank for leaf in found.leaves if leaf.path == "w"} == {0, 1}


def test_norms_wait_where_they_take_too_long_but_nan_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FREE_BYTES", 0)
    monkeypatch.setattr(module, "SHARE", -1.0)
    monkeypatch.setattr(module, "WAITED_SHARE", -1.0)
    state = {"w": np.ones(100_000)}

    def spoil(step: int) -> None:
        state["w"][5] = NAN if step == 3 else step

    repo = train(tmp_path, state, 3, spoil)
    first, second, third = (leaves(repo.health(step))["w"] for step in (1, 2, 3))
    assert first.norm is None and first.sampled == 0
    assert second.norm == pytest.approx(math.sqrt(99_999 + 4)), "at least every second save has them"
    assert third.norm is None and third.nonfinite == 1


def test_a_chunk_may_be_shorter_than_what_is_looked_at_or_cut_items(tmp_path: Path) -> None:
    Repo.create_or_open(open_store(tmp_path), chunk_bytes=1000)
    state = {"w": np.arange(5000.0), "long": np.arange(2000, dtype=np.longdouble), "short": np.ones(500)}
    found = leaves(train(tmp_path, state, 1).health())
    assert (found["w"].min, found["w"].max, found["w"].sampled) == (0.0, 4999.0, 1.0)
    assert found["long"].sampled > 0.9 and found["short"].norm == pytest.approx(math.sqrt(500))


@pytest.mark.parametrize(
    "record", [{}, {"norm": "!"}, {"norm": "AAAA"}, 5, {"nonfinite": [[9, 1, 1, 0]]}, {"nonfinite": [[0]]}]
)
def test_statistics_that_no_save_writes_are_damage(record: Any) -> None:
    columns = dict.fromkeys(("norm", "min", "max", "changed", "sampled"), "AAAAAA==") | {"nonfinite": []}
    whole = columns | record if isinstance(record, dict) and record else record
    assert decode(None, 1, name="i") is None
    assert decode(columns, 1, name="i") is not None
    with pytest.raises(CorruptionError):
        decode(whole, 1, name="i")


# -- what follows ------------------------------------------------------------------------------------------------------


def test_retention_keeps_the_newest_healthy_one_and_best_never_takes_another(tmp_path: Path) -> None:
    state = {"w": np.zeros(3)}

    def spoil(step: int) -> None:
        state["w"][0] = NAN if step > 2 else step

    with tenuto.Checkpointer(
        tmp_path, state, save=every(steps=1), keep=keep.latest(2) | keep.best(1, "loss"), log="silent"
    ) as ckpt:
        for step in ckpt.steps(6):
            spoil(step + 1)
            ckpt.log(loss=1 / (step + 1))
    repo = tenuto.Repository(tmp_path)
    assert [id.step for id in repo.checkpoints()] == [6, 5, 2]
    assert repo.best("loss").step == 2


def test_where_all_are_unhealthy_there_is_no_best(tmp_path: Path) -> None:
    state = {"w": np.array([NAN])}
    with tenuto.Checkpointer(tmp_path, state, save=every(steps=1), log="silent") as ckpt:
        for _ in ckpt.steps(1):
            ckpt.log(loss=1.0)
    with pytest.raises(CheckpointNotFound, match="unhealthy"):
        tenuto.Repository(tmp_path).best("loss", mode="min")


def spoiled_from(step: int, place: Path, total: int = 4, **more: Any) -> list[str]:
    """Trains with values that are NaN from `step` on; returns what was said."""
    state, said = {"w": np.zeros(3)}, []

    def spoil(now: int) -> None:
        state["w"][0] = NAN if now >= step else now

    def hear(event: Any) -> None:
        if isinstance(event, tenuto.events.Warned):
            said.append(event.message)

    train(place, state, total, spoil, sinks=[hear], **more)
    return said


def test_the_first_unhealthy_save_is_reported_with_the_way_back(tmp_path: Path) -> None:
    (said,) = spoiled_from(3, tmp_path)
    assert said.startswith("main/a0001/3 is unhealthy: 1 leaf with NaN or infinities (w)")
    assert "the newest healthy one is step 2: tenuto rollback" in said


def test_a_resume_and_a_load_take_it_and_say_so(tmp_path: Path) -> None:
    spoiled_from(3, tmp_path)
    said = spoiled_from(3, tmp_path, total=5)
    assert said[0].startswith("main/a0001/4 has 1 leaf with NaN or infinities (w); the newest healthy one is step 2")
    heard: list[Any] = []
    found = tenuto.load(tmp_path, sinks=[heard.append])
    assert found.step == 5 and any("rollback" in getattr(event, "message", "") for event in heard)


def test_a_function_is_called_at_the_next_step_with_what_went_wrong(tmp_path: Path) -> None:
    found: list[tenuto.Unhealthy] = []
    state = {"w": np.zeros(3)}
    with tenuto.Checkpointer(
        tmp_path, state, save=every(steps=1), keep=keep.all(), on_unhealthy=found.append, log="silent"
    ) as ckpt:
        for step in ckpt.steps(4):
            state["w"][0] = NAN if step == 1 else 0
            if step == 2:
                ckpt.wait()
    (one,) = found
    assert (one.what, one.step, one.leaves) == ("values", 2, ("w",)) and "w" in str(one)
    assert one.last_healthy is not None and one.last_healthy.step == 1


def test_stop_ends_training_when_values_are_nan(tmp_path: Path) -> None:
    state, steps = {"w": np.zeros(3)}, 0
    with tenuto.Checkpointer(tmp_path, state, save=every(steps=1), on_unhealthy="stop", log="silent") as ckpt:
        for step in ckpt.steps(50):
            state["w"][0] = NAN if step == 4 else 0
            ckpt.wait()
            steps = step + 1
    assert steps == 6


def test_a_loss_that_jumps_or_diverges_is_told_from_log_and_step_done(tmp_path: Path) -> None:
    found: list[tenuto.Unhealthy] = []
    state = {"w": np.zeros(3)}
    with tenuto.Checkpointer(tmp_path, state, save=every(steps=1000), on_unhealthy=found.append, log="silent") as ckpt:
        for step in ckpt.steps(30):
            ckpt.log(loss=9.0 if step == 20 else 1.0 + step % 2 / 10, accuracy=9.0 if step == 25 else 1.0)
    assert [(one.what, one.metric, one.step) for one in found] == [("spike", "loss", 21)]


def test_a_single_spike_stops_nothing_and_divergence_does(tmp_path: Path) -> None:
    state, last = {"w": np.zeros(3)}, 0
    with tenuto.Checkpointer(tmp_path, state, save=every(steps=1000), on_unhealthy="stop", log="silent") as ckpt:
        for step in ckpt.steps(60):
            ckpt.log(loss=9.0 if step == 20 or step >= 30 else 1.0 + step % 2 / 10)
            last = step
    assert last == 34


@pytest.mark.parametrize("more", [{"health": 1}, {"on_unhealthy": "raise"}])
def test_arguments_that_make_no_sense_are_refused(tmp_path: Path, more: Any) -> None:
    with pytest.raises(UsageError, match=next(iter(more))):
        tenuto.Checkpointer(tmp_path, {"w": np.zeros(3)}, **more)


def test_spikes_of_a_run_by_its_checkpoints(tmp_path: Path) -> None:
    state = {"w": np.zeros(1)}
    with tenuto.Checkpointer(tmp_path, state, save=every(steps=1), keep=keep.all(), log="silent") as ckpt:
        for step in ckpt.steps(20):
            ckpt.log(val_loss=5.0 if step == 15 else 1.0)
    (spike,) = tenuto.Repository(tmp_path).spikes("val_loss")
    assert (spike.step, spike.kind) == (16, "spike")
    with pytest.raises(tenuto.errors.MetricNotLogged, match="val_loss"):
        tenuto.Repository(tmp_path).spikes("val_los")
