"""An example for each name that most people use; `generate_reference.py` puts it under the name, and the tests run it.

A page's examples share one namespace, in which `model`, `optimizer`, `loader`, `train_step` and `evaluate` are there.
"""

EXAMPLES = {
    "tenuto.Checkpointer": """
import tenuto
from tenuto import every, keep, on

with tenuto.Checkpointer(
    "checkpoints",
    {"model": model, "optimizer": optimizer},
    data=loader,
    save=every(minutes=10) | on.end() | on.signal(),
    keep=keep.latest(3),
) as ckpt:
    for step in ckpt.steps(100):  # resumes from the newest whole checkpoint
        ckpt.log(loss=train_step(next(ckpt.batches)))
""",
    "tenuto.every": """
every(steps=500)
every(minutes=10)
every(epochs=1) | every(minutes=30)  # whichever comes first
every(stall="1%")  # as often as blocks training for one percent of its time
""",
    "tenuto.on": """
every(minutes=10) | on.end() | on.signal()  # the default
on.improve("val_loss") | on.improve("accuracy", mode="max", by=0.01)
on.drop("loss", by="5%")
""",
    "tenuto.keep": """
keep.latest(3)
keep.latest(2) | keep.best(3, "val_loss")
keep.latest(2) | keep.best(3, "accuracy", mode="max") | keep.every(hours=24)
keep.within(days=2) | keep.daily(14) | keep.weekly(8) | keep.every(steps=100_000)
keep.limit(keep.hourly(24) | keep.monthly(12) | keep.yearly() | keep.after("fork"), bytes="2TB")
keep.limit(keep.all(), cost=100, per_gib_month=0.023)  # as much as that buys
""",
    "tenuto.Stats": """
print(ckpt.stats)
share = ckpt.stats.held_share  # of the time, training was blocked by saves
""",
    "tenuto.save": """
import tenuto

saved = tenuto.save({"model": model, "labels": ["cat", "dog"]}, "checkpoints", step=500)
print(saved.step, saved.bytes)
""",
    "tenuto.load": """
restored = tenuto.load("checkpoints", into={"model": model})  # fills the model in place
state = tenuto.load("checkpoints").state  # no object to fill: a dict of tensors and values
weight = tenuto.load("checkpoints", include="model/weight").state["model"]["weight"]
print(restored.step, state["labels"])
""",
    "tenuto.register": """
import enum


class Phase(enum.Enum):
    WARM_UP = 1
    TRAIN = 2


tenuto.register(Phase)
tenuto.save({"phase": Phase.TRAIN}, "phases")
assert tenuto.load("phases").state["phase"] is Phase.TRAIN
""",
    "tenuto.Repository": """
import tenuto

tenuto.save({"model": model}, "checkpoints", step=500)

there = tenuto.Repository("checkpoints")
for id in there.checkpoints():  # newest first
    print(id.step, there.metrics(id))
there.tag("baseline", step=500)
print(there.latest_step())
""",
    "tenuto.open": """
with tenuto.open("checkpoints") as opened:
    for path, leaf in opened.items():
        print(path, leaf.dtype, leaf.shape)
    first_row = opened["model/weight"][0]  # reads and verifies only what it needs
""",
    "tenuto.shard": """
import numpy as np

import tenuto

rows = np.zeros((250, 64), np.float32)  # this rank's quarter of a table of 1000 rows
state = {"table": tenuto.shard(rows, dim=0, rank=0, of=4)}
""",
    "tenuto.per_rank": """
state["seen"] = tenuto.per_rank({"batches": 0})  # each rank saves its own
""",
    "tenuto.Stripe": """
where = tenuto.Stripe("nvme0/checkpoints", "nvme1/checkpoints")  # commands take stripe:///nvme0/…,/nvme1/…
tenuto.save({"model": model}, where)
""",
    "tenuto.Cached": """
tenuto.save({"model": model}, "far/checkpoints")
where = tenuto.Cached("far/checkpoints", "scratch/cache", limit="200GB")
tenuto.load(where, into={"model": model})
""",
    "tenuto.Tier": """
from tenuto import keep

archive = tenuto.Tier("archive/run", save=tenuto.every(steps=1000), keep=keep.all(), bandwidth="200MB/s")
""",
    "tenuto.Tiers": """
import tenuto

place = tenuto.Tiers(tenuto.Tier("fast/run"), tenuto.Tier("archive/run"))
with tenuto.Checkpointer(place, {"model": model}, save=tenuto.every(steps=100)) as ckpt:
    for step in ckpt.steps(200):
        ...
""",
    "tenuto.PerNode": """
import tenuto

place = tenuto.PerNode("disk/run", home="shared/run")
tenuto.save({"model": model}, place)
""",
    "tenuto.Mirror": """
place = tenuto.Mirror("one/run", "another/run")
tenuto.save({"model": model}, place)
""",
    "tenuto.torch.ResumableSampler": """
import torch
from torch.utils.data import DataLoader, TensorDataset

import tenuto.torch

samples = TensorDataset(torch.arange(1000.0))
order = tenuto.torch.ResumableSampler(samples, seed=0, rank=0, world_size=4)
loader = DataLoader(samples, batch_size=8, sampler=order)  # for Checkpointer(data=loader)
""",
    "tenuto.errors": """
import tenuto
from tenuto import errors

try:
    tenuto.load("no-such-directory")
except errors.NotARepository as error:  # a FileNotFoundError too
    print(error)
    print(error.hint, error.exit_code)
""",
    "tenuto.telemetry": """
import tenuto

lines = tenuto.telemetry.JsonLines("events.jsonl")
tenuto.save({"model": model}, "checkpoints", sinks=[lines])
lines.close()
""",
    "tenuto.events": """
import tenuto
from tenuto import events


class Durations:
    def emit(self, event):
        if isinstance(event, events.Committed):
            print(f"step {event.id.step}: {event.seconds:.1f} s")


tenuto.save({"model": model}, "checkpoints", sinks=[Durations()])
""",
}
