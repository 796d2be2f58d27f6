"""A training with accelerate, in the forms that people write it; see `tenuto.testing.trainer_suite` for the options."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import tenuto
import tenuto.accelerate
from tenuto import every, keep, on

EPOCHS = 3
DEVICE = os.environ.get("TRAINERS_DEVICE", "cpu")
"""`cuda` trains on the GPU of the machine, by kernels that do the same twice."""
if DEVICE != "cpu":
    torch.use_deterministic_algorithms(True)


class Augmented(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Draws from two global generators for each sample, as augmentation does in a loader without workers."""

    def __init__(self, drawn: bool) -> None:
        self.drawn = drawn

    def __len__(self) -> int:
        return 38

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.linspace(0, 1, 6) * (index + 1) / 38
        if self.drawn:
            x = x + 0.1 * torch.rand(6) + 0.1 * float(np.random.rand())
        return x, x.sum(0, keepdim=True).sin()


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """A stream that says its state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while self.at < 38:
            self.at += 1
            x = torch.linspace(0, 1, 6) * self.at / 38 + 0.1 * torch.rand(6)
            yield x, x.sum(0, keepdim=True).sin()
        self.at = 0

    def __len__(self) -> int:
        return 38

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Average:
    """An object of the script's own that is registered for checkpointing."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = [p.detach().clone() for p in model.parameters()]

    def update(self, model: nn.Module) -> None:
        for mine, p in zip(self.shadow, model.parameters(), strict=True):
            mine.lerp_(p.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {str(i): tensor for i, tensor in enumerate(self.shadow)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for i, tensor in enumerate(self.shadow):
            tensor.copy_(state[str(i)])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--where", default="")
    parser.add_argument("--out", required=True)
    parser.add_argument("--resume-from", type=int)
    parser.add_argument("--every-step", action="store_true")
    parser.add_argument("--case", default="plain")
    parser.add_argument("--form", default="batches", choices=("batches", "epochs", "own", "attach"))
    return parser.parse_args()


def main() -> None:
    args = arguments()
    set_seed(7)
    case = args.case
    accelerator = Accelerator(
        cpu=DEVICE == "cpu",
        gradient_accumulation_steps=3 if case == "accumulate" else 1,
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=case == "seedable",
            use_stateful_dataloader=case == "stateful",
            dispatch_batches=True if case == "dispatch" else None,
        ),
    )
    norm = nn.BatchNorm1d(16)
    model: nn.Module = nn.Sequential(nn.Linear(6, 16), norm, nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)
    workers = 2 if case == "workers" else 0
    data: Dataset[Any] = Stream() if case == "stream" else Augmented(drawn=not workers)
    inner: DataLoader[Any] = DataLoader(data, batch_size=4, shuffle=case != "stream", num_workers=workers)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, inner, scheduler)
    average = Average(model)
    accelerator.register_for_checkpointing(average)
    counters: dict[str, Any] = {"history": []}
    own = tenuto.per_rank(counters) if accelerator.num_processes > 1 else counters

    def train(batch: Any) -> bool:
        """Returns whether the optimizer has made a step."""
        x, y = batch
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        counters["history"].append(
            [round(loss.item(), 12), accelerator.gradient_state.remainder, accelerator.sync_gradients]
        )
        if accelerator.sync_gradients:
            average.update(model)
        return bool(accelerator.sync_gradients)

    done = 0
    if args.where == "":
        for _ in range(EPOCHS):
            for batch in loader:
                if train(batch):
                    done += 1
                    print("step", done, flush=True)
    elif args.form == "attach":
        script_as_it_is(args, accelerator, loader, counters, train)
    else:
        with tenuto.Checkpointer(
            args.where,
            {**tenuto.accelerate.state(accelerator), "history": own},
            data=loader,
            save=(every(steps=1) if args.every_step else every(steps=4)) | on.end() | on.signal(),
            keep=keep.all() if args.every_step else keep.latest(2),
            resume_from="latest" if args.resume_from is None else args.resume_from,
        ) as ckpt:
            if args.form == "own":
                ckpt.restore()
                while loader.iteration < EPOCHS:
                    for batch in loader:
                        if train(batch):
                            ckpt.step_done()
                            print("step", ckpt.step, flush=True)
            elif args.form == "batches":
                length = len(loader)
                for step in ckpt.steps(EPOCHS * length):
                    train(next(ckpt.batches))
                    print("step", step + 1, flush=True)
            else:
                for _ in ckpt.epochs(EPOCHS, accumulate=3 if case == "accumulate" else 1):
                    for batch in ckpt.batches:
                        if train(batch):
                            print("step", ckpt.step + 1, flush=True)
    digest = {name: of(t) for name, t in accelerator.unwrap_model(model).state_dict().items()}
    digest |= {f"average/{i}": of(t) for i, t in enumerate(average.shadow)}
    for i, state in enumerate(optimizer.state.values()):
        digest |= {f"optimizer/{i}/{k}": of(v) for k, v in state.items()}
    digest["rng/torch"], digest["rng/numpy"] = of(torch.get_rng_state()), of(np.random.get_state()[1])
    if DEVICE != "cpu":
        digest["rng/device"] = of(torch.cuda.get_rng_state())
    digest["lr"] = str(scheduler.get_last_lr())
    if accelerator.is_main_process:
        Path(args.out).write_text(json.dumps({"digest": digest, "history": counters["history"]}))
    accelerator.end_training()


class Registered:
    """What such a script counts, as it registers it."""

    def __init__(self, counters: dict[str, Any]) -> None:
        self.counters = counters

    def state_dict(self) -> dict[str, Any]:
        return {"history": list(self.counters["history"])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counters["history"] = list(state["history"])


def script_as_it_is(
    args: argparse.Namespace, accelerator: Accelerator, loader: Any, counters: dict[str, Any], train: Any
) -> None:
    """The loop of accelerate's own examples, with one line more."""
    tenuto.accelerate.attach(accelerator, args.where)
    accelerator.register_for_checkpointing(Registered(counters))
    output = Path(args.where) / "output"
    output.mkdir(parents=True, exist_ok=True)
    global_step = first_epoch = resume_step = 0
    there = sorted(int(one.name.split("-")[1]) for one in output.iterdir() if one.name.startswith("checkpoint"))
    if there:
        global_step = args.resume_from or there[-1]
        accelerator.load_state(str(output / f"checkpoint-{global_step}"))
        batches = global_step * accelerator.gradient_accumulation_steps
        if accelerator.gradient_accumulation_steps > 1:  # the last update of an epoch may have fewer
            per_epoch = -(-len(loader) // accelerator.gradient_accumulation_steps)
            epoch, inside = divmod(global_step, per_epoch)
            batches = epoch * len(loader) + inside * accelerator.gradient_accumulation_steps
        first_epoch, resume_step = divmod(batches, len(loader))
    for epoch in range(first_epoch, EPOCHS):
        batches = loader
        if epoch == first_epoch and resume_step:
            batches = accelerator.skip_first_batches(loader, resume_step)
        for batch in batches:
            if train(batch):
                global_step += 1
                if args.every_step or global_step % 4 == 0:
                    accelerator.save_state(str(output / f"checkpoint-{global_step}"))
                print("step", global_step, flush=True)


def of(value: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(value.cpu() if hasattr(value, "cpu") else value).tobytes()).hexdigest()


if __name__ == "__main__":
    main()
