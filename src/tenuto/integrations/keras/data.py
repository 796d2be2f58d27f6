"""Batches whose order and place are known, for `fit`: an epoch can be entered in its middle.

Keras asks a source for batch 0, 1, 2, … of an epoch, on some backends ahead of training and from other threads. So the
order of an epoch follows from a seed and the epoch's number alone, and the place is what the callback counts.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from tenuto.errors import StateMismatch, UsageError
from tenuto.integrations.keras.internals import PyDatasetAdapter


class _SampleBatches(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches of samples by number, in an order."""

    def __init__(self, samples: int, batch_size: int, *, drop_last: bool = False, workers: int = 1) -> None:
        super().__init__(workers=workers)
        self.samples = samples
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.order = np.arange(samples)

    @property
    def num_batches(self) -> int:
        return self.samples // self.batch_size if self.drop_last else -(-self.samples // self.batch_size)

    def __getitem__(self, index: int) -> Any:
        return self.take(self.order[index * self.batch_size : (index + 1) * self.batch_size])

    def take(self, samples: Any) -> Any:
        raise NotImplementedError


class _ArrayBatches(_SampleBatches):
    def __init__(self, arrays: Any, batch_size: int) -> None:
        self.arrays = keras.tree.map_structure(np.asarray, arrays)
        lengths = {len(one) for one in keras.tree.flatten(self.arrays)}
        if len(lengths) != 1:
            raise UsageError(f"arrays of different lengths: {sorted(lengths)}", subject="x", hint="one row per sample")
        super().__init__(lengths.pop(), batch_size)

    def take(self, samples: Any) -> Any:
        return keras.tree.map_structure(lambda one: one[samples], self.arrays)


class _LoaderBatches(_SampleBatches):
    """What a torch DataLoader over a data set with numbered samples gives; its workers become threads."""

    def __init__(self, loader: Any) -> None:
        samples = len(loader.dataset)
        super().__init__(samples, loader.batch_size, drop_last=loader.drop_last, workers=max(loader.num_workers, 1))
        self.dataset, self.collate = loader.dataset, loader.collate_fn

    def take(self, samples: Any) -> Any:
        batch = self.collate([self.dataset[int(one)] for one in samples])
        found = keras.tree.map_structure(lambda one: np.asarray(one.cpu() if hasattr(one, "cpu") else one), batch)
        return tuple(found) if isinstance(found, list) else found


class _Rest(keras.utils.PyDataset):  # type: ignore[misc]
    """What is left of an epoch, as Keras sees it: batch 0 is the next one."""

    def __init__(self, source: Any) -> None:
        super().__init__(source.workers, source.use_multiprocessing, source.max_queue_size)
        self.source = source
        self.order: Any = np.arange(source.num_batches)
        self.start = 0

    @property
    def num_batches(self) -> int:
        return len(self.order) - self.start

    def __getitem__(self, index: int) -> Any:
        return self.source[int(self.order[self.start + index])]

    def on_epoch_begin(self) -> None:
        self.source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self.source.on_epoch_end()


class ResumableData(PyDatasetAdapter):  # type: ignore[misc]
    """What `resumable` returns. Give it to `fit` and, as `data=`, to the callback."""

    def __init__(self, source: Any, *, shuffle: bool, seed: int | None, class_weight: Any) -> None:
        self._source = source
        self._rest = _Rest(source)
        self._shuffle = shuffle
        self._seed = random.getrandbits(63) if seed is None else seed
        self._epoch = self._batch = self._unled = 0
        self._prepared = False
        super().__init__(self._rest, class_weight=class_weight, shuffle=False)

    @property
    def num_batches(self) -> int:
        """Of a whole epoch."""
        return int(self._source.num_batches)

    def first_batch(self) -> Any:
        """Returns a batch, for its shapes."""
        return self._standardize_batch(self._source[0])

    def on_epoch_begin(self) -> None:
        if not self._prepared:  # by no callback: each time the next epoch
            self.begin(self._unled, 0)
            self._unled += 1
        self._prepared = False
        super().on_epoch_begin()

    def get_torch_dataloader(self) -> Any:
        """Returns Keras's, which draws nothing from torch's global generator: torch's dropout takes its numbers there,
        and Keras makes an iterator more where an epoch has run to its last number."""
        import torch

        loader = super().get_torch_dataloader()
        loader.generator = torch.Generator()
        return loader

    def begin(self, epoch: int, batch: int) -> None:
        """Prepares an epoch, of which `batch` batches are done."""
        self._epoch, self._batch, self._prepared = epoch, batch, True
        by_sample = isinstance(self._source, _SampleBatches)
        count = self._source.samples if by_sample else self.num_batches
        order = np.arange(count)
        if self._shuffle:
            order = np.random.default_rng((self._seed, epoch)).permutation(count)
        if by_sample:
            self._source.order = order
        else:
            self._rest.order = order
        self._rest.start = batch
        while self.enqueuer is not None and not self.enqueuer.ready_queue.empty():
            self.enqueuer.ready_queue.get()  # read ahead in an epoch before: Keras would begin this one with them

    def trained(self, epoch: int, batch: int) -> None:
        """Counts: training has used so many batches of the epoch."""
        self._epoch, self._batch = epoch, batch

    def state_dict(self) -> dict[str, Any]:
        order = {"seed": str(self._seed), "shuffle": self._shuffle, "batches": self.num_batches}
        return {**order, "epoch": self._epoch, "batch": self._batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, now in (("shuffle", self._shuffle), ("batches", self.num_batches)):
            if state[name] != now:
                raise StateMismatch(
                    f"the data had {name}={state[name]} when it was saved, and has {name}={now} now",
                    subject="data",
                    hint="wrap the same data in the same way; or begin another run: TenutoCheckpoint(…, run='new')",
                )
        self._seed, self._epoch, self._batch = int(state["seed"]), state["epoch"], state["batch"]


def resumable(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int = 32,
    shuffle: bool = True,
    seed: int | None = None,
    class_weight: Mapping[int, float] | None = None,
) -> ResumableData:
    """Returns data for `fit` whose epochs can be resumed in their middle: `fit(data, callbacks=[TenutoCheckpoint(where,
    data=data)])`.

    x: arrays of samples (with `y`, `sample_weight` and `batch_size`), a finite `keras.utils.PyDataset`, or a torch
        DataLoader over a data set with numbered samples, whose workers become threads.
    shuffle: a new order in each epoch: of samples, of a PyDataset of its batches. A DataLoader says it itself.
        `fit(shuffle=)` has no effect on it, nor have its `batch_size` and `class_weight`.
    seed: decides the orders; by default it is drawn from Python's generator, which
        `keras.utils.set_random_seed` seeds. A resumed run goes on with the one that was saved.

    Raises UsageError for what has no batches by number.
    """
    if isinstance(x, keras.utils.PyDataset):
        if y is not None or sample_weight is not None:
            raise UsageError("a PyDataset gives its targets itself", subject="y", hint="resumable(dataset)")
        if x.num_batches is None:
            raise UsageError(
                "a PyDataset without num_batches has no epochs", subject="x", hint="define num_batches in its class"
            )
        return ResumableData(x, shuffle=shuffle, seed=seed, class_weight=class_weight)
    if (torch := sys.modules.get("torch")) is not None and isinstance(x, torch.utils.data.DataLoader):
        return ResumableData(_LoaderBatches(x), shuffle=_shuffles(x), seed=seed, class_weight=class_weight)
    if hasattr(x, "__next__") or (hasattr(x, "__iter__") and not hasattr(x, "__len__")):
        raise UsageError(
            f"a {type(x).__name__} has no batches by number, so an epoch of it cannot be entered in its middle",
            subject="x",
            hint="give arrays or a keras.utils.PyDataset; or leave data= out, and resume at the beginning of epochs",
        )
    parts = (x,) if y is None else (x, y) if sample_weight is None else (x, y, sample_weight)
    batches = _ArrayBatches(parts, batch_size)
    return ResumableData(batches, shuffle=shuffle, seed=seed, class_weight=class_weight)


def _shuffles(loader: Any) -> bool:
    """Returns whether a DataLoader gives a random order. UsageError for one that cannot be asked by number."""
    from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

    sampler = loader.sampler
    plain = type(loader.batch_sampler) is BatchSampler and type(sampler) in (RandomSampler, SequentialSampler)
    if not plain or isinstance(loader.dataset, IterableDataset) or getattr(sampler, "replacement", False):
        raise UsageError(
            f"the order of this DataLoader ({type(sampler).__name__} over {type(loader.dataset).__name__}) cannot be "
            "given by number",
            subject="x",
            hint="write it as a keras.utils.PyDataset; or leave data= out, and resume at the beginning of epochs",
        )
    return type(sampler) is RandomSampler
