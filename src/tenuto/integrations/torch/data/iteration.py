"""Which DataLoaders this process is in the middle of, whoever iterates them.

A training that gives its Checkpointer no data may still take batches from a DataLoader, and then its certificate must
not call a resume exact. torch calls nothing when a loader is iterated, so the base of all its iterators (torchdata's,
accelerate's and other subclasses among them) gets an `__init__` that also notes the iterator, weakly. A batch costs
nothing more.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

_iterators: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.Lock()


def follow() -> None:
    """Begins to note iterators, once per process."""
    with _lock:
        made = _BaseDataLoaderIter.__init__
        if hasattr(made, "__wrapped__"):
            return

        @functools.wraps(made)
        def noted(self: Any, *arguments: Any, **options: Any) -> None:
            made(self, *arguments, **options)
            with _lock:
                _iterators.add(self)

        _BaseDataLoaderIter.__init__ = noted  # type: ignore[method-assign]


def iterated(state: Mapping[str, Any]) -> list[str]:
    """Names the loaders that have begun an epoch and not given all of it, but for those that are entries of `state`."""
    with _lock:
        found = list(_iterators)
    known = {id(loader.dataset) for loader in state.values() if isinstance(loader, DataLoader)}
    open_ones = [one._dataset for one in found if _inside(one) and id(one._dataset) not in known]
    return [f"a DataLoader over {type(dataset).__name__}" for dataset in open_ones]


def _inside(iterator: Any) -> bool:
    """Returns whether batches were given and more may come: how many there are not every sampler says."""
    given = iterator._num_yielded
    if not given or isinstance(iterator._dataset, IterableDataset):
        return bool(given)
    try:
        return bool(given < len(iterator))
    except (TypeError, NotImplementedError):
        return True
