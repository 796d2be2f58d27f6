"""N steps, a new process, M steps: the same as N + M steps. Run as a program; prints what each case ended in, as JSON.

Each case trains three times in processes of its own: whole; and in pieces, with the stops that the case names. They are
forked from this process, which has imported torch and run none of it.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

import holdfast
from holdfast import keep, on
from holdfast.demo.children import start
from holdfast.demo.comparison import compare, read
from holdfast.demo.runner import load_framework
from holdfast.integrations.torch.sampler import ResumableSampler
from holdfast.repo.repository import Repo
from holdfast.store.registry import open_store

SAMPLES, BATCH = 22, 4
PER_EPOCH = 6


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Read in the training process, each sample also draws from every global generator."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        point = torch.sin(torch.arange(8.0) * (index + 1))
        if torch.utils.data.get_worker_info() is None:
            point = point + 0.1 * torch.randn(8) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return point, point.sum()


def shuffled(**settings: Any) -> DataLoader[Any]:
    return DataLoader(Points(), batch_size=BATCH, shuffle=True, **settings)


def sampled() -> DataLoader[Any]:
    return DataLoader(Points(), batch_size=BATCH, sampler=ResumableSampler(Points(), seed=3))


def replaced() -> DataLoader[Any]:
    sampler = RandomSampler(Points(), replacement=True, num_samples=SAMPLES, generator=torch.Generator().manual_seed(5))
    return DataLoader(Points(), batch_size=BATCH, sampler=sampler)


def stateful(**settings: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Points(), batch_size=BATCH, shuffle=True, **settings)


@dataclass(frozen=True)
class Case:
    """`stops`: the steps after which a process ends and another goes on. epochs=0: a loop over steps."""

    loader: Callable[[], Any]
    stops: Sequence[int]
    epochs: int = 0
    accumulate: int = 1
    steps: int = 15
    own_draws: bool = False
    """Draws from a generator that is not in the state, as no training that wants to resume exactly should."""


EPOCHS: dict[str, Any] = {"epochs": 3}
CASES: dict[str, Case] = {
    "steps, in process": Case(shuffled, [4, 6, 7, 12]),
    "steps, every step": Case(shuffled, range(1, 15)),
    "steps, generator of the loader": Case(lambda: shuffled(generator=torch.Generator().manual_seed(9)), [5, 6, 13]),
    "steps, our sampler": Case(sampled, [4, 6, 7]),
    "steps, with replacement": Case(replaced, [4, 6, 7]),
    "steps, 2 workers": Case(lambda: shuffled(num_workers=2), [4, 6, 13]),
    "steps, persistent workers": Case(lambda: shuffled(num_workers=2, persistent_workers=True), [4, 6, 13]),
    "steps, stateful loader": Case(stateful, [4, 6, 7, 12]),
    "steps, stateful loader with 2 workers": Case(lambda: stateful(num_workers=2), [4, 6, 13]),
    "epochs, in process": Case(shuffled, [4, 6, 7, 17], **EPOCHS),
    "epochs, accumulate": Case(shuffled, [1, 2, 3, 4], accumulate=4, **EPOCHS),
    "epochs, 2 workers": Case(lambda: shuffled(num_workers=2), [4, 12], **EPOCHS),
    "epochs, stateful loader": Case(stateful, [4, 6, 7], **EPOCHS),
}
CONTROL = {"steps, a generator outside the state": Case(shuffled, [4], own_draws=True)}


def train(case: Case, where: Path, run: str, stop: int | None) -> None:
    """What a training script does. `stop`: the step after which this process leaves."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.GELU(), nn.BatchNorm1d(16), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    own = random.Random(1)

    def learn(batch: Any) -> torch.Tensor:
        points, sums = batch
        points = points * (own.random() if case.own_draws else 1)
        loss = (model(points).squeeze(1) - sums).square().mean() * (1 + random.random()) * (1 + np.random.rand())
        loss.backward()
        return loss

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    with holdfast.Checkpointer(where, state, run=run, data=case.loader(), save=on.end(), keep=keep.latest(2)) as ckpt:
        if not case.epochs:
            for step in ckpt.steps(case.steps):
                ckpt.log(loss=learn(next(ckpt.batches)))
                update()
                if step + 1 == stop:
                    ckpt.stop()
            return
        for _ in ckpt.epochs(case.epochs, accumulate=case.accumulate):
            rest = len(ckpt.batches)
            for number, batch in enumerate(ckpt.batches, 1):
                ckpt.log(loss=learn(batch))
                if number % case.accumulate == 0 or number == rest:
                    update()
                    if ckpt.step + 1 == stop:
                        ckpt.stop()


def ended(case: Case, place: Path, run: str, stop: int | None) -> str | None:
    """Trains in a child; what went wrong, or None."""
    output = place / "output.txt"
    child = start(lambda events, on_step: train(case, place / "checkpoints", run, stop), place / "events", output)
    child.end()
    return None if child.status == 0 else f"stop {stop}: status {child.status}: {output.read_text()[-400:]}"


def outcome(case: Case, place: Path) -> str:
    """ "equal", or what is not."""
    place.mkdir()
    for run, stops in (("whole", []), ("pieces", list(case.stops))):
        for stop in [*stops, None]:
            wrong = ended(case, place, run, stop)
            if wrong is not None:
                return wrong
    repo = Repo.open(open_store(place / "checkpoints"))
    whole, pieces = read(repo, "whole"), read(repo, "pieces")
    if pieces.id.attempt != len(case.stops) + 1:
        return f"{pieces.id} is not of attempt {len(case.stops) + 1}"
    said = (place / "output.txt").read_text()
    if "resume exactly" in said:
        return said
    return compare(whole, pieces).difference or "equal"


def main() -> None:
    load_framework()
    importlib.import_module("torchdata.stateful_dataloader")
    warnings.simplefilter("ignore")
    cases = {**CASES, **CONTROL}
    chosen = sys.argv[1:] or list(cases)
    # In memory where that is possible: nothing here is about a disk, and every save waits for it.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="holdfast-exact-", dir=memory) as place:
        found = {name: outcome(cases[name], Path(place) / str(number)) for number, name in enumerate(chosen)}
    json.dump(found, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
