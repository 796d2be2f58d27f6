"""The position in the batches of a Trainer.

A Trainer takes its batches from a loader that accelerate has prepared, which reads one batch ahead, and after a resume
it skips the *indices* of those that were used. That repeats an epoch only where its order follows from a seed alone and
reading a batch draws nothing. So three states of the random generators are kept: that at the epoch's beginning, from
which the order is drawn again; that before the batch which was read ahead was read; and, with the checkpoint, that of
the step, which comes back before anything is read after it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from tenuto.errors import UsageError
from tenuto.events import warn
from tenuto.integrations.torch import rng
from tenuto.integrations.torch.data.host_generators import HostGenerators, in_full
from tenuto.integrations.torch.data.worker_generators import LEFT_EARLY, WorkerGenerators, follow
from tenuto.state.position import rng as global_rng

DEEPEST: Final = 4
"""Batch samplers around one another, at most."""


class BatchOrder:
    """Counts the batches that a Trainer takes, and repeats the order of an epoch: a Checkpointer's `data=`."""

    def __init__(self) -> None:
        self.epoch = 0
        self.delivered = 0
        """Batches of the epoch that were taken."""
        self.ended = True
        self.reasons: tuple[str, ...] = ()
        """Why the resume that this training began with was not exact."""
        self.batches: Iterator[Any] | None = None
        """The rest of an epoch that a checkpoint was taken in, to be used in place of the Trainer's own iterator."""
        self._loaded: Mapping[str, Any] | None = None
        self._start: dict[str, Any] | None = None
        self._own: list[torch.Generator] = []
        self._generators = HostGenerators()
        self._latest: tuple[int, Any] | None = None
        """The number of the batch that was read last, and the generators before that."""
        self._resume: tuple[int, Mapping[str, Any] | None, Callable[[], None]] | None = None
        self._workers: WorkerGenerators | None = None
        self._stride = 1
        """Batches of the loader inside that make one of the Trainer's."""
        self._kept = False
        """Whether this epoch began with workers that had been started in an earlier one."""
        self._epochs = 0
        """Epochs that this training has begun, here or in the processes before."""

    def __iter__(self) -> Iterator[Any]:
        raise UsageError("the Trainer iterates its own loader", subject="data", hint="trainer.train()")

    # -- the Trainer's epochs ------------------------------------------------------------------------------------------

    def begin(self, loader: Any, epoch: int, after: int, settle: Callable[[], None]) -> None:
        """Begins an epoch with `loader`, of which the Trainer skips `after` batches, before it makes its iterator.
        `settle`: restores the random state of the checkpoint."""
        loaded, self._loaded = self._loaded, None
        self.batches = self._latest = self._resume = None
        self._generators = HostGenerators()
        left_early, self.epoch, self.delivered, self.ended = not self.ended, epoch, after, False
        self._own = _own_generators(loader)
        self._watch(loader)
        if loaded is not None:
            self._epochs = loaded.get("epochs", 1)
        if loaded is None or loaded["ended"] or loaded["epoch"] != epoch:
            base = self._workers_of(loader)
            if loaded is not None and base is not None and base.persistent_workers and not loaded["ended"]:
                self._add_reason(LEFT_EARLY)
            self._kept = self._epochs > 0
            self._epochs += 1
            self._follow(loader, 0, loaded, left_early=left_early)
        if loaded is None or loaded["ended"] or loaded["epoch"] != epoch:
            if loaded is not None:
                settle()
                self._set_own(loaded["own"])
            self._start = {
                "global": in_full(self._generators.capture()),
                "own": [one.get_state() for one in self._own],
            }
            return
        self._kept = loaded.get("kept", False)
        self._start = dict(loaded["start"])
        global_rng.apply(self._start["global"])
        self._set_own(self._start["own"])
        self._resume = (after, loaded["before"] if after == loaded["delivered"] else None, settle)
        rest = self._rest(loader, epoch, after)
        self._follow(rest, after, loaded)
        self.batches = iter(rest)

    def _workers_of(self, loader: Any) -> DataLoader[Any] | None:
        """Returns the loader inside, where its workers' generators are followed."""
        base = getattr(loader, "base_dataloader", loader)
        followed = isinstance(base, DataLoader) and base.num_workers > 0 and not hasattr(base, "state_dict")
        return base if followed and not isinstance(base.dataset, IterableDataset) else None

    def _follow(self, loader: Any, after: int, loaded: Mapping[str, Any] | None, *, left_early: bool = False) -> None:
        """Has the batches of workers come with their generators, and workers that start anew begin with those."""
        base = self._workers_of(loader)
        if base is None:
            return
        if self._workers is None:
            self._workers = WorkerGenerators(base, weakref.WeakMethod(self._add_reason))
            self._workers.ahead = 2 * self._stride
        if loaded is not None:
            for reason in self._workers.load(loaded.get("workers"), inside=not loaded["ended"]):
                self._add_reason(reason)
        running = base.persistent_workers and base._iterator is not None
        if running:
            self._workers.goes_on(left_early=left_early)
        kept = self._kept and base.persistent_workers
        follow(base, self._workers, after * self._stride, fresh=not after and not kept, again=kept and not running)

    def _add_reason(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons += (reason,)
            warn(f"the data does not resume exactly: {reason}")

    def settle(self, restore: Callable[[], None]) -> None:
        """Restores the random state where the Trainer does, unless it came back while the first batch was read."""
        if self.batches is None or self._resume is not None:
            restore()
        self._resume = None

    def before_draw(self, number: int) -> None:
        """Called before the indices of batch `number` (from 0) are drawn, and its samples are read."""
        if self._resume is not None:
            after, before, settle = self._resume
            if number < after:
                return
            if number == after and before is not None:
                global_rng.apply(before)
            else:
                self._resume = None
                settle()
        self._latest = (number, self._generators.capture())

    def _rest(self, loader: Any, epoch: int, after: int) -> Any:
        from accelerate import skip_first_batches

        rest = skip_first_batches(loader, after)
        if hasattr(rest, "set_epoch"):
            rest.set_epoch(epoch)
        self._watch(rest)
        return rest

    def _watch(self, loader: Any) -> None:
        """Has `before_draw` called by a loader that reads in this process, one batch ahead at most."""
        base = getattr(loader, "base_dataloader", loader)
        # accelerate's dispatcher reads a batch for each rank at once, on the first one
        dispatches = type(loader).__name__ == "DataLoaderDispatcher" and not loader.split_batches
        self._stride = stride = loader.state.num_processes if dispatches else 1
        sampler = getattr(base, "batch_sampler", None)
        if sampler is None or getattr(base, "num_workers", None) != 0 or hasattr(base, "state_dict"):
            return
        inner = sampler
        while isinstance(inner, Sampler) and not isinstance(inner, DrawnIndices):
            inner = getattr(inner, "batch_sampler", None)
        if inner is None:
            base.__dict__["batch_sampler"] = DrawnIndices(sampler, self.before_draw, stride)  # torch refuses to set it

    def _set_own(self, states: Any) -> None:
        if len(states) == len(self._own):
            rng.set_generators(self._own, states, "data/generators")

    # -- what is saved -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self._loaded is not None:
            return dict(self._loaded)
        before = in_full(self._latest[1]) if self._latest is not None and self._latest[0] == self.delivered else None
        return {
            "epoch": self.epoch,
            "delivered": self.delivered,
            "ended": self.ended,
            "start": None if self.ended else self._start,
            "own": [one.get_state() for one in self._own],
            "before": None if self.ended else before,
            "epochs": self._epochs,
            "kept": self._kept,
            **({} if self._workers is None else {"workers": self._workers.state(self.delivered * self._stride)}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loaded = state

    def forget(self) -> None:
        """Forgets what was loaded: the epoch begins, or goes on, by the Trainer's own count."""
        self._loaded = None


class DrawnIndices(Sampler[Any]):
    """A batch sampler that says before each batch that it is drawn. `stride`: as many are drawn at once."""

    def __init__(self, inner: Any, before_draw: Callable[[int], None], stride: int) -> None:
        self._inner = inner
        self._before_draw = before_draw
        self._stride = stride

    def __iter__(self) -> Iterator[Any]:
        drawn, number = iter(self._inner), 0
        while True:
            if number % self._stride == 0:
                self._before_draw(number // self._stride)
            try:
                indices = next(drawn)
            except StopIteration:
                return
            number += 1
            yield indices

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)


def _own_generators(loader: Any) -> list[torch.Generator]:
    """Returns the generators of the loader and of the samplers in it, each once."""
    found: list[torch.Generator] = []
    owner, depth = getattr(loader, "base_dataloader", loader), 0
    while owner is not None and depth < DEEPEST:
        for holder in (owner, getattr(owner, "sampler", None)):
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator) and not any(generator is other for other in found):
                found.append(generator)
        owner, depth = getattr(owner, "batch_sampler", None), depth + 1
    return found
