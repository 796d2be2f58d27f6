"""One script saves, another loads: no loop, no policy.

python save_once.py write checkpoints
python save_once.py read checkpoints
"""

import sys

import torch
from torch import nn

import tenuto


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))


def write(where: str) -> None:
    torch.manual_seed(0)
    checkpoint = tenuto.save({"model": build(), "labels": ["cat", "dog"]}, where, run="classifier")
    print(f"saved {checkpoint.id}: {checkpoint.leaves} leaves, {checkpoint.bytes} bytes")


def read(where: str) -> nn.Module:
    model = build()
    found = tenuto.load(where, into={"model": model}, run="classifier")  # every byte is verified
    labels = tenuto.load(where, include="labels", run="classifier").state["labels"]
    print(f"loaded {found.checkpoint.id} for {labels}; left aside: {list(found.report.skipped)}")
    return model


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](*sys.argv[2:3] or ["checkpoints"])
