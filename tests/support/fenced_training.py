"""Trainings that save behind a fence, small enough for a test: what was late in each save, what each image must be."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import tenuto
from tenuto import every, keep
from tenuto.engine.fence import fence
from tenuto.engine.save import fenced_capture as engine
from tenuto.events import Committed, Event, LeafDemoted, SaveFailedEvent
from tenuto.integrations.torch import device
from tenuto.state import update_barrier

Tensors = dict[str, torch.Tensor]
SLICE = 64


@dataclass
class Told:
    """What happened, save by save."""

    late: dict[int, set[str]] = field(default_factory=dict)
    """Step -> paths of the leaves that were copied after `save` returned."""
    watched: dict[int, set[str]] = field(default_factory=dict)
    torn: dict[int, set[str]] = field(default_factory=dict)
    """Step -> paths of the leaves that the fence itself has found torn in its image."""
    snapshots: dict[int, Tensors] = field(default_factory=dict)
    """Step -> what the state held when the save was taken."""
    events: list[Event] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def await_end_of(self, step: int) -> None:
        """Returns once the save of a step is committed or has failed, of which the next one knows then."""
        until = time.monotonic() + 60
        while not any(isinstance(one, Committed | SaveFailedEvent) and one.id.step == step for one in self.events):
            assert time.monotonic() < until, f"the save of step {step} has not ended"
            time.sleep(0.002)

    @property
    def demoted(self) -> dict[str, str]:
        return {event.path: event.reason for event in self.events if isinstance(event, LeafDemoted)}

    @property
    def failed(self) -> dict[int, str]:
        return {event.id.step: event.error for event in self.events if isinstance(event, SaveFailedEvent)}


@contextmanager
def spying(told: Told) -> Iterator[None]:
    """Tiny leaves are fenced too, in tiny slices, and `told` learns which were."""

    class Spied(fence.Fence):
        def __init__(self, flattened: Any, choice: Any, places: Any, observer: Any, *, pace: Any, name: str) -> None:
            step = int(name.rpartition("-")[2])
            told.late[step] = {flattened.specs[span.leaf].path for span in choice.late}
            told.watched[step] = {flattened.specs[span.leaf].path for span in choice.watched}
            super().__init__(flattened, choice, places, observer, pace=pace, name=name)
            self._told_of = step, flattened.specs

        def _is_torn(self, leaf: int, why: str) -> None:
            step, specs = self._told_of
            told.torn.setdefault(step, set()).add(specs[leaf].path)
            super()._is_torn(leaf, why)

    with (
        mock.patch.object(engine, "Fence", Spied),
        mock.patch.object(update_barrier, "LEAST_BYTES", 1),
        mock.patch.object(update_barrier, "_EDGE", 16),
        mock.patch.object(device, "HOST_STEP", SLICE),
        mock.patch("tenuto.integrations.torch.device.TorchBound.late_step", SLICE),
    ):
        yield


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that a restored state holds, with where it lies."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from tensors_in(child, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for number, child in enumerate(value):
            yield from tensors_in(child, f"{path}/{number}")


def state_dicts(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.state_dict() if hasattr(value, "state_dict") else value
        for name, value in state.items()
        if hasattr(value, "state_dict") or isinstance(value, torch.Tensor)
    }


def snapshot(state: dict[str, Any]) -> Tensors:
    return {path: tensor.detach().clone() for path, tensor in tensors_in(state_dicts(state))}


def train(
    where: Path,
    state: dict[str, Any],
    body: Callable[[int], object],
    *,
    steps: int = 8,
    told: Told | None = None,
    finish: Callable[[tenuto.Checkpointer], object] | None = None,
    **more: Any,
) -> Told:
    """Trains `steps` steps and saves after each; `body(step)` is the step."""
    told = told or Told()
    more = {"capture": "fenced", "save": every(steps=1), "keep": keep.all(), "sinks": [told], **more}
    with spying(told), tenuto.Checkpointer(where, state, **more) as ckpt:
        for step in ckpt.steps(steps):
            body(step)
            told.snapshots[step + 1] = snapshot(state)
        if finish is not None:
            finish(ckpt)
    return told


def committed(where: Path) -> list[int]:
    return sorted(id.step for id in tenuto.Repository(where).checkpoints("main"))


def assert_images_are_right(where: Path, state: dict[str, Any], told: Told) -> list[int]:
    """Every committed checkpoint is, bit for bit, what the state was when it was taken. Their steps."""
    steps = committed(where)
    for step in steps:
        tenuto.load(where, into=state, step=step)
        found, wanted = snapshot(state), told.snapshots[step]
        assert found.keys() == wanted.keys(), (step, found.keys() ^ wanted.keys())
        for path, tensor in wanted.items():
            same = torch.equal(bits(found[path]), bits(tensor))
            assert same, f"step {step}: {path} is not what it was when it was saved"
    return steps


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.reshape(-1)


class Model(torch.nn.Module):
    """Linear layers with a BatchNorm between: parameters, statistics, a counter."""

    def __init__(self, width: int = 8, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, 2 * width, dtype=dtype)
        self.norm = torch.nn.BatchNorm1d(2 * width, dtype=dtype)
        self.last = torch.nn.Linear(2 * width, width, dtype=dtype)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(batch))))


WORDS = 16


class Words(torch.nn.Module):
    """How a language model begins and ends. tied: in one weight; max_norm: a forward pass writes the first."""

    def __init__(
        self, width: int = 8, dtype: torch.dtype = torch.float32, *, tied: bool = False, max_norm: float | None = None
    ) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, width, max_norm=max_norm, dtype=dtype)
        self.norm = torch.nn.BatchNorm1d(width, dtype=dtype)
        self.head = torch.nn.Linear(width, WORDS, bias=False, dtype=dtype)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(words)))


def loss_of(model: torch.nn.Module, width: int = 8) -> torch.Tensor:
    weight = next(model.parameters())
    words = isinstance(model, Words)
    batch = torch.randint(WORDS, (4,)) if words else torch.randn(4, width, dtype=weight.dtype)
    return model(batch).square().mean()


def stepping(model: torch.nn.Module, *optimizers: torch.optim.Optimizer, width: int = 8) -> Callable[[int], None]:
    def body(step: int) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, width).backward()
        for optimizer in optimizers:
            optimizer.step()

    return body


def owned(told: Told) -> set[str]:
    """Leaves that were late in some save."""
    return set(itertools.chain.from_iterable(told.late.values()))


class HeldCopy:
    """Keeps the copying thread from its work until the test lets go."""

    def __init__(self) -> None:
        self._go = threading.Event()
        self._go.set()
        self.reached = threading.Event()
        """A copy has come to where it is held."""

    def hold(self) -> None:
        self.reached.clear()
        self._go.clear()

    def let_go(self) -> None:
        self._go.set()

    def wait(self) -> None:
        if not self._go.is_set():
            self.reached.set()
        assert self._go.wait(60)


@contextmanager
def holding() -> Iterator[HeldCopy]:
    held = HeldCopy()
    copy_one = device.HostCopies.copy

    def patched(self: device.HostCopies, number: int) -> None:
        if threading.current_thread().name.startswith("tenuto-fence"):
            held.wait()
        copy_one(self, number)

    with mock.patch.object(device.HostCopies, "copy", patched):
        yield held
        held.let_go()
