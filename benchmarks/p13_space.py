"""P13: what 200 checkpoints of real trainings take, by encoding: bytes stored, what a save costs, what a restore costs.

    python benchmarks/p13_space.py

Four trainings, in each of which another part of the state stays as it was between two saves: adapters on a frozen
model, a full fine-tune with Adam (nothing stays), a head on a frozen embedding, and a mixture of experts, most of
which get no text in a step. One process trains; at each save every encoding saves the same state, in turn, into a
repository of its own that keeps everything, and `torch.save` with a flush writes it as one file. Restores are of the
first, the middle and the last checkpoint, from the page cache, into existing tensors, and every bit is compared.

*Changed* are the bytes of the chunks of 256 KiB in which any bit differs from the save before.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Result, arguments, median_interval, note, report, workplace
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu
from torch.utils.data import DataLoader

import tenuto
from tenuto import keep, on
from tenuto.codec.digest import CHUNK_BYTES, digest
from tenuto.demo import train_gpt

ENCODINGS = ("plain", "dedupe", "small", "auto")
GAPS = (1, 10)
WIDTH = 192
EXPERTS = 16
RESTORES = 5
PACKS = (".pack", ".safetensors")


class Adapted(nn.Module):
    """A frozen linear layer and what low rank adds to it."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + self.up(self.down(x))
        return found


class Experts(nn.Module):
    """Of many feed-forward layers each text goes through one, which a gate chooses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x.mean(1)).softmax(-1)
        best, chosen = shares.max(-1)
        out = [best[text] * self.experts[int(one)](x[text]) for text, one in enumerate(chosen)]
        return torch.stack(out)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.recent = nn.Conv1d(WIDTH, WIDTH, 8)
        self.experts = Experts(WIDTH)
        self.output = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        hidden = nn.functional.pad(self.bytes(text).transpose(1, 2), (7, 0))
        hidden = gelu(self.recent(hidden)).transpose(1, 2)
        found: Tensor = self.output(hidden + self.experts(hidden))
        return found


class Head(nn.Module):
    """Predicts a byte from the pairs of bytes before it, whose embedding is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Embedding(1 << 16, 64).requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(4 * 64, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, 256))

    def forward(self, text: Tensor) -> Tensor:
        padded = nn.functional.pad(text.long(), (4, 0))
        pairs = self.pairs(padded[:, :-1] * 256 + padded[:, 1:])
        found: Tensor = self.head(pairs.unfold(1, 4, 1).flatten(2))
        return found


def adapters() -> nn.Module:
    model = train_gpt.GPT().requires_grad_(False)
    for layer in model.blocks.layers:
        layer.linear1, layer.linear2 = Adapted(layer.linear1), Adapted(layer.linear2)
    return model


@dataclass(frozen=True)
class Kind:
    name: str
    what: str
    build: Callable[[], nn.Module]
    texts: int = train_gpt.BATCH


KINDS = (
    Kind("adapters", "adapters on a frozen model", adapters),
    Kind("full", "full fine-tune, fp32 and Adam", lambda: train_gpt.GPT()),
    Kind("head", "a head on a frozen embedding", Head),
    Kind("experts", f"{EXPERTS} experts, a few of which get text", Mixture, texts=4),
)


@dataclass
class Kept:
    """What one encoding made of a training."""

    where: Path
    put: list[int] = field(default_factory=list)
    packs: list[int] = field(default_factory=list)
    stall: list[float] = field(default_factory=list)
    save: list[float] = field(default_factory=list)
    restore: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, checkpointer: tenuto.Checkpointer, step: int) -> None:
        began = time.perf_counter()
        handle = checkpointer.save()
        self.stall.append(time.perf_counter() - began)
        handle.wait()
        self.save.append(time.perf_counter() - began)
        sizes = {path: path.stat().st_size for path in self.where.glob(f"runs/main/a0001/step-{step:08d}/*")}
        self.put.append(sum(sizes.values()))
        self.packs.append(sum(size for path, size in sizes.items() if path.suffix in PACKS))

    def facts(self) -> dict[str, Any]:
        return {
            "stored": sum(self.put),
            "put": int(np.median(self.put[1:])),
            "packs": int(np.median(self.packs[1:])),
            "packs_after_the_first": sum(self.packs[1:]),
            "stall_s": float(np.median(self.stall[1:])),
            "save_s": float(np.median(self.save[1:])),
            "restore_s": {which: float(np.median(times)) for which, times in self.restore.items()},
        }


class Training:
    """One training, every state of which each encoding saves."""

    def __init__(self, kind: Kind, place: Path, *, gap: int, checkpoints: int) -> None:
        torch.manual_seed(0)
        train_gpt.WIDTH = WIDTH
        self.kind, self.gap, self.checkpoints = kind, gap, checkpoints
        self.model = kind.build()
        trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=3e-4)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.place = place
        self.kept = {name: Kept(place / name) for name in ENCODINGS}
        self.files: list[float] = []
        self.file_bytes = self.state_bytes = self.changed = 0

    def run(self) -> dict[str, Any]:
        loader = DataLoader(train_gpt.library(1 << 20), batch_size=self.kind.texts, shuffle=True, drop_last=True)
        texts = _endless(loader)
        steps = [self.gap * (number + 1) for number in range(self.checkpoints)]
        judged = {"first": steps[0], "middle": steps[len(steps) // 2], "last": steps[-1]}
        copies: dict[int, dict[str, Any]] = {}
        before: dict[tuple[str, int], tuple[bytes, int]] = {}
        for one in self.optimizer.param_groups[0]["params"]:
            one.grad = torch.zeros_like(one)
        self.optimizer.step()  # all of its state is there from the first save on
        options = {"save": on.end(), "keep": keep.all()}
        opened = {
            name: tenuto.Checkpointer(one.where, self.state, encoding=name, **options)
            for name, one in self.kept.items()
        }
        for number, step in enumerate(steps):
            for _ in range(self.gap):
                self._step(next(texts))
                for checkpointer in opened.values():
                    checkpointer.step_done()
            now = _digests(self.state)
            if number:
                self.changed += sum(one[1] for place, one in now.items() if before.get(place) != one)
            before, self.state_bytes = now, sum(size for _, size in now.values())
            turn = number % len(ENCODINGS)
            for name in [*ENCODINGS[turn:], *ENCODINGS[:turn]]:
                self.kept[name].measure(opened[name], step)
            self._file()
            if step in judged.values():
                copies[step] = {name: one.clone() for name, one in _tensors(self.state)}
            if number % 20 == 19:
                note(f"{self.kind.name}, gap {self.gap}: {number + 1} of {len(steps)} saves")
        for checkpointer in opened.values():
            checkpointer.close()
        for which, step in judged.items():
            self._restore(which, step, copies[step])
        return self.facts()

    def facts(self) -> dict[str, Any]:
        return {
            "what": self.kind.what,
            "gap": self.gap,
            "checkpoints": self.checkpoints,
            "state": self.state_bytes,
            "changed": self.changed // max(self.checkpoints - 1, 1),
            "torch.save": {"stored": self.file_bytes * self.checkpoints, "save_s": float(np.median(self.files))},
            **{name: one.facts() for name, one in self.kept.items()},
        }

    def _step(self, batch: list[Tensor]) -> None:
        (text,) = batch
        logits = self.model(text[:, :-1].int())
        loss = cross_entropy(logits.flatten(0, 1), text[:, 1:].long().flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def _file(self) -> None:
        path, began = self.place / "whole.pt", time.perf_counter()
        with path.open("wb") as file:
            torch.save({name: one.state_dict() for name, one in self.state.items()}, file)
            file.flush()

            os.fsync(file.fileno())
        self.files.append(time.perf_counter() - began)
        self.file_bytes = path.stat().st_size

    def _restore(self, which: str, step: int, expected: dict[str, Tensor]) -> None:
        for number in range(RESTORES + 1):
            turn = number % len(ENCODINGS)
            for name in [*ENCODINGS[turn:], *ENCODINGS[:turn]]:
                for _, one in _tensors(self.state):
                    one.zero_()
                began = time.perf_counter()
                tenuto.load(self.kept[name].where, into=self.state, step=step)
                if number:
                    self.kept[name].restore.setdefault(which, []).append(time.perf_counter() - began)
                found = dict(_tensors(self.state))
                same = all(
                    torch.equal(one.view(-1).view(torch.uint8), found[path].view(-1).view(torch.uint8))
                    for path, one in expected.items()
                )
                assert found.keys() == expected.keys() and same, f"{name}, step {step}: not what was saved"


def _endless(loader: DataLoader[Any]) -> Iterator[list[Tensor]]:
    while True:
        yield from loader


def _tensors(state: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, one in state["model"].state_dict().items():
        yield f"model/{name}", one
    for number, moments in state["optimizer"].state_dict()["state"].items():
        for name, one in moments.items():
            yield f"optimizer/{number}/{name}", one


def _digests(state: dict[str, Any]) -> dict[tuple[str, int], tuple[bytes, int]]:
    """Returns digest and length of each chunk of a state; a tensor that is tied to another counts once."""
    found, seen = {}, set()
    for path, one in _tensors(state):
        if one.data_ptr() in seen:
            continue
        seen.add(one.data_ptr())
        data = one.detach().contiguous().view(-1).view(torch.uint8).numpy()
        for begin in range(0, len(data), CHUNK_BYTES):
            part = data[begin : begin + CHUNK_BYTES]
            found[path, begin] = digest(part.data), len(part)
    return found


def options_of(parser: argparse.ArgumentParser) -> None:
    names = [kind.name for kind in KINDS]
    parser.add_argument("--checkpoints", type=int, default=200, help="how many are kept (default %(default)d)")
    parser.add_argument("--gaps", type=int, nargs="*", default=list(GAPS), help="steps between two saves")
    parser.add_argument("--kinds", nargs="*", choices=names, default=names, help="which trainings (default: all)")


def main() -> None:
    options = arguments(__doc__ or "", add=options_of)
    result = Result("p13_space", {}, 0)
    found: dict[str, Any] = {}
    with workplace(options) as place:
        for kind in KINDS:
            for gap in options.gaps if kind.name in options.kinds else ():
                where = place / f"{kind.name}-{gap}"
                training = Training(kind, where, gap=gap, checkpoints=options.checkpoints)
                title = f"{kind.name}, gap {gap}"
                facts = found[title] = training.run()
                note(f"{title}: {facts}")
                shutil.rmtree(where)
                result.bytes = max(result.bytes, training.state_bytes)
                for name, kept in training.kept.items():
                    result.seconds[f"{title}: {name}: save"] = kept.save[1:]
                    result.memory[f"{title}: {name}: put by a save"] = kept.put[1:]
                plain = training.kept["plain"]
                for name in ("dedupe", "auto"):
                    kept, allowed = training.kept[name], 1.02 * facts["changed"] + 0.001 * facts["state"]
                    most = [np.mean(kept.packs[1:]) / allowed]
                    text = f"{title}: {name}: data of a save <= 1.02x the changed bytes + 0.1 %"
                    result.judge_value(text, median_interval(most), at_most=1.0)
                for which in plain.restore:
                    ratios = np.array(training.kept["small"].restore[which]) / np.array(plain.restore[which])
                    text = f"{title}: restore of the {which}, small, <= 1.5x of plain"
                    result.judge_value(text, median_interval(ratios.tolist()), at_most=1.5)
        options.leaves = 0
        result.facts["trainings"] = found
        report(result, options, place)


if __name__ == "__main__":
    main()
