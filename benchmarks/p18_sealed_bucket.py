"""P18: what 200 checkpoints of a LoRA run and of a full fine-tune take and cost in a sealed repository in a bucket.

    python benchmarks/p18_sealed_bucket.py

The trainings are P13's, narrower, one step between two saves. The bucket is a Ceph RADOS gateway on loopback, whose
disk is a file in memory (`make test-stores` installs it). Each encoding saves the same state, in turn, into a
repository of its own that keeps everything: "dedupe" and "small", sealed, and every tenth state plain and unsealed.
Restores are of the last checkpoint into existing tensors; every bit is compared. *Stored* is what a listing of the
bucket adds up to, manifests and indexes included; of plain, ten times what its saves took.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Result, arguments, note, report
from p13_space import KINDS, Kind, _endless, _tensors
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import tenuto
from tenuto import keep, on
from tenuto.cli import main as command
from tenuto.demo import train_gpt
from tenuto.store.registry import open_store

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from stores.ceph_gateway import CephGateway

WIDTH = 128
PLAIN_EVERY = 10
ENCODINGS = ("plain", "dedupe", "small")
RESTORES = 5
NAMES = {"adapters": "adapters on a frozen model (LoRA)", "full": "full fine-tune, fp32 and Adam"}


def sealed(url: str, key: Path) -> None:
    tenuto.save({"x": torch.zeros(1)}, url, run="begun")
    try:
        command(["key", "add", url, "--key-file", str(key)])
    except SystemExit as ended:
        assert not ended.code, "a key was added"


def run(kind: Kind, server: CephGateway, key: Path, checkpoints: int) -> dict[str, Any]:
    torch.manual_seed(0)
    train_gpt.WIDTH = WIDTH
    model = kind.build()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=3e-4)
    state = {"model": model, "optimizer": optimizer}
    for one in optimizer.param_groups[0]["params"]:
        one.grad = torch.zeros_like(one)
    optimizer.step()
    where = {name: server.new_place() for name in ENCODINGS}
    begun = {}
    for name in ENCODINGS[1:]:
        sealed(where[name], key)
        begun[name] = sum(entry.length for entry in open_store(where[name]).walk(""))
    saves: dict[str, list[float]] = {name: [] for name in ENCODINGS}
    stalls: dict[str, list[float]] = {name: [] for name in ENCODINGS}
    opened = {
        name: tenuto.Checkpointer(
            where[name],
            state,
            save=on.end(),
            keep=keep.all(),
            encoding=name,  # type: ignore[arg-type]
            **({} if name == "plain" else {"key": str(key)}),
        )
        for name in ENCODINGS
    }
    texts = _endless(DataLoader(train_gpt.library(1 << 20), batch_size=kind.texts, shuffle=True, drop_last=True))
    for number in range(checkpoints):
        (text,) = next(texts)
        loss = cross_entropy(model(text[:, :-1].int()).flatten(0, 1), text[:, 1:].long().flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for name, checkpointer in opened.items():
            checkpointer.step_done()
            if name != "plain" or number % PLAIN_EVERY == PLAIN_EVERY - 1:
                began = time.perf_counter()
                handle = checkpointer.save()
                stalls[name].append(time.perf_counter() - began)
                handle.wait()
                saves[name].append(time.perf_counter() - began)
        if number % 20 == 19:
            note(f"{kind.name}: {number + 1} of {checkpoints} saves")
    for checkpointer in opened.values():
        checkpointer.close()
    expected = {path: one.clone() for path, one in _tensors(state)}
    restores: dict[str, list[float]] = {name: [] for name in ENCODINGS}
    for _ in range(RESTORES):
        for name in ENCODINGS:
            for _, one in _tensors(state):
                one.zero_()
            began = time.perf_counter()
            tenuto.load(where[name], into=state, key=None if name == "plain" else str(key), run="main")
            restores[name].append(time.perf_counter() - began)
            assert all(torch.equal(one, expected[path]) for path, one in _tensors(state)), f"{name}: not what was saved"
    stored = {name: sum(entry.length for entry in open_store(where[name]).walk("")) for name in ENCODINGS}
    facts: dict[str, Any] = {"what": NAMES[kind.name], "state": sum(one.nbytes for one in expected.values())}
    for name in ENCODINGS:
        total = stored[name] * PLAIN_EVERY if name == "plain" else stored[name] - begun[name]
        facts[name] = {
            "stored": total,
            "stall_s": float(np.median(stalls[name][1:])),
            "save_s": float(np.median(saves[name][1:])),
            "restore_s": float(np.median(restores[name])),
        }
    note(f"{facts}")
    return {"facts": facts, "saves": saves, "restores": restores}


def options_of(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoints", type=int, default=200, help="how many are kept (default %(default)d)")


def main() -> None:
    options = arguments(__doc__ or "", add=options_of)
    result = Result("p18_sealed_bucket", {}, 0)
    home = Path(tempfile.mkdtemp(prefix="tenuto-ceph-", dir="/dev/shm"))
    server = CephGateway(home)
    found: dict[str, Any] = {}
    try:
        server.start()
        os.environ.update(server.environment())
        for kind in KINDS:
            if kind.name in NAMES:
                one = run(kind, server, home / "tenuto.key", options.checkpoints)
                found[kind.name] = one["facts"]
                result.bytes = max(result.bytes, one["facts"]["state"])
                for name in ENCODINGS:
                    result.seconds[f"{kind.name}: {name}: save"] = one["saves"][name][1:]
                    result.seconds[f"{kind.name}: {name}: restore"] = one["restores"][name]
    finally:
        server.stop()
        shutil.rmtree(home, ignore_errors=True)
    options.leaves = 0
    result.facts["trainings"] = found
    report(result, options, home)


if __name__ == "__main__":
    main()
