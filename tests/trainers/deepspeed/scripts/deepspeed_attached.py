"""A script with `save_checkpoint` and `load_checkpoint`: `deepspeed_attached.py WHERE STEPS OUT [TAG]`, on one rank.

OUT gets weights, counters and the client's state at the end.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", os.environ.get("TRAINERS_DEVICE", "cpu"))

import deepspeed
import torch
from torch import nn

import tenuto
import tenuto.deepspeed

where, steps, out, *tags = sys.argv[1:]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))
config = {"train_batch_size": 4, "zero_optimization": {"stage": 1}, "optimizer": {"type": "Adam", "params": {}}}
config["optimizer"]["params"]["torch_adam"] = True
deepspeed.init_distributed("nccl" if os.environ["DS_ACCELERATOR"] == "cuda" else "gloo")
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
attached = tenuto.deepspeed.attach(engine, where, keep=tenuto.keep.all())

path, client = engine.load_checkpoint("unused", tag=tags[0] if tags else None)
seen = client["seen"] if client else []
while engine.global_steps < int(steps):
    loss = engine(torch.rand(4, 6).to(engine.device)).square().mean()
    engine.backward(loss)
    engine.step()
    seen = [*seen, engine.global_steps]
    assert engine.save_checkpoint("unused", client_state={"seen": seen})
    if engine.global_steps == 2:
        engine.save_checkpoint("unused", tag="best", client_state={"seen": seen})
attached.close()
assert not Path("unused").exists()
weights = {name: value.tolist() for name, value in engine.module.state_dict().items()}
Path(out).write_text(json.dumps({"path": path, "seen": seen, "weights": weights}))
