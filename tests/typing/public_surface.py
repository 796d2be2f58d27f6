"""What a type checker has to understand of everything in `tenuto.__all__`. Read by mypy and pyright; never run.

`tenuto` loads its names when they are first asked for; a checker has to see through that.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, assert_type

import numpy as np

import tenuto
from tenuto import every, keep, on
from tenuto.engine.read.opened import Leaf
from tenuto.events import Event
from tenuto.history.bisect import Bisection
from tenuto.history.fork import ForkPlan
from tenuto.history.rollback import RollbackPlan
from tenuto.history.rows import Row
from tenuto.history.timeline import Timeline
from tenuto.model.ids import CheckpointId
from tenuto.policy.keep import KeepPolicy
from tenuto.policy.save import SavePolicy
from tenuto.state.declarations import FirstRank, PerRank, Replicated, Shard
from tenuto.telemetry import LogSink
from tenuto.training.loops import Batches, Epochs, Steps


def modules(event: tenuto.events.Event) -> None:
    assert_type(tenuto.telemetry.LogSink(), LogSink)
    assert_type(tenuto.errors.StoreFull("full").hint, str | None)


def policies() -> None:
    assert_type(every(steps=200), SavePolicy)
    assert_type(every(steps=200, minutes=2.5, epochs=1), SavePolicy)
    assert_type(every(minutes=10) | on.end() | on.signal(), SavePolicy)
    assert_type(on.improve("val_loss", mode="max", by="5%") | on.drop("loss", by=0.1), SavePolicy)
    assert_type(keep.latest(3), KeepPolicy)
    assert_type(keep.latest(3) | keep.best(2, "val_loss", mode="min"), KeepPolicy)
    assert_type(keep.every(steps=1000, hours=24) | keep.all(), KeepPolicy)
    assert_type(keep.hourly(24) | keep.monthly() | keep.yearly() | keep.within(hours=36, weeks=1), KeepPolicy)
    assert_type(keep.limit(keep.after("fork"), bytes="2TB"), KeepPolicy)
    assert_type(keep.limit(keep.all(), cost=100, per_gib_month=0.023), KeepPolicy)


class Printing:
    def emit(self, event: Event) -> None:
        print(event)


def checkpointer(place: Path, state: dict[str, object], loader: list[int]) -> None:
    with tenuto.Checkpointer(
        place,
        state,
        run="gpt",
        data=loader,
        save=every(minutes=10) | on.end(),
        keep=keep.latest(3) | keep.best(2, "val_loss", mode="max"),
        resume_from="latest",
        on_busy="skip",
        on_error="raise",
        takeover=True,
        wait_for_owner=30.0,
        memory_budget=1 << 30,
        in_flight=2,
        encoding=tenuto.Encoding(codec="lz4", delta=4),
        key="env:KEY",
        ranks=tenuto.SharedFiles(place, rank=0, world_size=2),
        log="saves",
        sinks=[Printing(), print],
    ) as ckpt:
        assert_type(ckpt, tenuto.Checkpointer)
        assert_type(ckpt.steps(100), Steps)
        assert_type(ckpt.epochs(10, accumulate=4), Epochs)
        for step in ckpt.steps(100):
            assert_type(step, int)
            assert_type(next(ckpt.batches), Any)
            ckpt.log(loss=0.5, accuracy=np.float32(1))
        for epoch in ckpt.epochs(10):
            assert_type(epoch, int)
            assert_type(ckpt.batches, Batches)
            for batch in ckpt.batches:
                assert_type(batch, Any)
        assert_type(ckpt.step, int)
        assert_type(ckpt.epoch, int)
        assert_type(len(ckpt.steps(5)), int)
        assert_type(ckpt.restore(), tenuto.Restored | None)
        assert_type(ckpt.save(wait=True), tenuto.Save)
        assert_type(ckpt.latest_step(), int | None)
        assert_type(ckpt.stats, tenuto.Stats)
        ckpt.restore_random_state()
        ckpt.step_done(step=7, loss=0.5)
        ckpt.log(tag="baseline", loss=0.5)
        ckpt.stop()
        ckpt.wait(timeout=60)
        ckpt.close(timeout=60)


def familiar_names(place: Path) -> None:
    tenuto.Checkpointer(place, {}, save_top_k=3, monitor="val_loss", mode="min", save_last=True)
    tenuto.Checkpointer("memory://here", {}, max_to_keep=5, resume_from=None)
    tenuto.Checkpointer("file:///data", {}, resume_from=500)


def saves(save: tenuto.Save) -> None:
    assert_type(save.wait(timeout=1.5), CheckpointId)
    assert_type(save.id, CheckpointId)
    assert_type(save.step, int)
    assert_type(save.bytes, int)
    assert_type(save.stall_s, float)
    assert_type(save.done, bool)
    assert_type(save.committed, bool)
    assert_type(save.error, tenuto.TenutoError | None)
    assert_type(save.timing, tenuto.Timing)
    assert_type(save.timing.held_s, float)


def costs(stats: tenuto.Stats) -> None:
    assert_type(stats.committed, int)
    assert_type(stats.held_share, float)
    assert_type(stats.disk_age_s, float | None)
    assert_type(stats.usual, tenuto.Timing | None)
    assert_type(stats.ranks, tenuto.RankTimings | None)


def values(place: Path) -> None:
    def hear(found: tenuto.Unhealthy) -> None:
        assert_type(found.step, int)
        assert_type(found.leaves, tuple[str, ...])
        assert_type(found.last_healthy, CheckpointId | None)

    tenuto.Checkpointer(place, {}, health=False)
    tenuto.Checkpointer(place, {}, on_unhealthy=hear)
    tenuto.Checkpointer(place, {}, on_unhealthy="stop")
    repository = tenuto.Repository(place)
    assert_type(repository.diff(500, "latest", where="model.safetensors").by_change()[0].cosine, float | None)
    assert_type(repository.health(500).leaves[0].norm, float | None)
    assert_type(repository.spikes("loss")[0].step, int)
    assert_type(tenuto.restart(), tenuto.Restart)
    assert_type(tenuto.restart().skips(5), bool)
    assert_type(tenuto.restart().batch_scale, float)


def one_off(place: Path, state: dict[str, object]) -> None:
    checkpoint = tenuto.save(state, place, step=3, run="gpt", ranks=tenuto.Solo(), ranks_timeout=60)
    assert_type(checkpoint, tenuto.Checkpoint)
    assert_type(checkpoint.step, int)
    assert_type(checkpoint.content, str)
    assert_type(checkpoint.metrics, Mapping[str, float])
    restored = tenuto.load(
        place,
        into=state,
        run="gpt",
        step="latest",
        strict=False,
        include=["model/*"],
        exclude="*/bias",
        rename={"a": "b"},
    )
    assert_type(restored, tenuto.Restored)
    assert_type(restored.state, Any)
    assert_type(restored.step, int)
    assert_type(restored.checkpoint, tenuto.Checkpoint)
    assert_type(restored.seconds, float)
    tenuto.load(str(place), rename=lambda path: path.removeprefix("module."), step=3)


def looking(place: Path) -> None:
    with tenuto.open(place, run="gpt", step="latest") as opened:
        assert_type(opened, tenuto.Opened)
        assert_type(opened["model/weight"], Leaf)
        assert_type(opened["model/weight"].shape, tuple[int, ...])
        assert_type(opened.step, int)
        assert_type(list(opened), list[str])
        assert_type(opened.metrics, Mapping[str, float])


def repositories(place: Path) -> None:
    repository = tenuto.Repository(place)
    assert_type(repository.query("val_loss < 2", sort="-step", limit=3, refresh=True), list[Row])
    assert_type(repository.runs(), list[str])
    assert_type(repository.latest("gpt"), CheckpointId | None)
    assert_type(repository.latest_step("gpt"), int | None)
    assert_type(repository.checkpoints("gpt"), list[CheckpointId])
    assert_type(repository.find("gpt", step="baseline"), CheckpointId)
    assert_type(repository.checkpoint(repository.find()), tenuto.Checkpoint)
    assert_type(repository.tags(), dict[str, CheckpointId])
    assert_type(repository.tag("baseline", step=3), CheckpointId)
    assert_type(repository.untag("baseline"), CheckpointId | None)
    assert_type(repository.log("gpt", limit=3), Timeline)
    assert_type(repository.compare([1, "a0002/3"], metric="loss", mode="min").rows(), list[dict[str, Any]])
    assert_type(repository.rollback(1, reason="diverged"), RollbackPlan)
    assert_type(repository.fork(1, "warm"), ForkPlan)
    assert_type(repository.bisect(where="loss > 3", good=1), Bisection)
    assert_type(repository.bisect(test=lambda id: id.step > 3).first, CheckpointId | None)
    assert_type(repository.hold(1, reason="audit").reason, str)
    assert_type(repository.add_metrics(1, {"loss": 2}), dict[str, float])
    assert_type(repository.verify(read="5%", limit="100MB/s").ok, bool)
    assert_type(repository.scrub(every="7d", duration="2h").overdue, int)
    assert_type(repository.plan_repair(sources=["/backup"]).lost, tuple[CheckpointId, ...])
    assert_type(repository.repair(steps=[500]).ok, bool)
    assert_type(repository.salvage("whole.safetensors", step=500).leaves, int)
    assert_type(repository.report(["gpt"]).to_html(title="Ours"), str)


def places(state: dict[str, int], directory: Path) -> None:
    node = tenuto.PerNode(directory, home="/shared/run", copies=2, node="a")
    assert_type(tenuto.save(state, node), tenuto.Checkpoint)
    mirror = tenuto.Mirror("/one", directory, "/three", copies=2)
    assert_type(tenuto.load(mirror), tenuto.Restored)
    tenuto.Checkpointer(mirror, state)
    tier = tenuto.Tier(
        "s3://bucket/run", save=tenuto.every(steps=9), keep=tenuto.keep.all(), capacity="5GB", wait=False
    )
    tenuto.Checkpointer(tenuto.Stripe("/nvme0", directory, part="4MiB"), state)
    tenuto.Checkpointer(tenuto.Cached("/far", directory, limit="50GB"), state)
    tiers = tenuto.Tiers(tenuto.Tier(directory, per_node=True), tenuto.Tier("/shared"), tier, copies=1)
    assert_type(tiers.lag(), tuple[tenuto.events.TierLag, ...])


def placements(tensor: object, declared: Shard) -> None:
    assert_type(tenuto.shard(tensor, whole=(8, 4), offsets=(4, 0)), Shard)
    assert_type(tenuto.shard(tensor, dim=0, rank=1, of=2), Shard)
    assert_type(tenuto.shard(tensor, whole=(8, 4), boxes=[(slice(4), (0, 0)), ((slice(4, 8),), (4, 0))]), Shard)
    assert_type(tenuto.fused(tensor, sizes=[8, 4, 4], rank=0, of=2), Shard)
    assert_type(tenuto.flat(tensor, whole=(8, 4), begin=16), Shard)
    assert_type(tenuto.replicated(tensor), Replicated)
    assert_type(tenuto.per_rank(tensor), PerRank)
    assert_type(tenuto.first_rank(tensor), FirstRank)
    assert_type(tenuto.late(), Any)
    tenuto.register(complex, lambda one: [one.real, one.imag], lambda plain: complex(*plain))
    tenuto.declare(declared)
    tenuto.declare(tenuto.replicated(tensor))


def the_rest(
    error: tenuto.TenutoError, odd: tenuto.TenutoWarning, leaving: tenuto.Preempted, value: tenuto.Tagged
) -> None:
    assert_type(error.hint, str | None)
    assert_type(error.subject, str | None)
    assert_type(error.exit_code, int)
    assert_type(leaving.signum, int)
    assert_type(leaving.signal_name, str)
    assert_type(value.type_name, str)
    assert_type(tenuto.__version__, str)
