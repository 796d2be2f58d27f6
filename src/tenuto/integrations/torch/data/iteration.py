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
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from tenuto.state.frameworks import is_stateful

_iterators: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.Lock()
_MOST: Final = 64
_DEEPEST: Final = 3
"""Containers and objects around a loader, at most."""


def follow() -> None:
    """Begins to note iterators, once per process."""
    with _lock:
        made = _BaseDataLoaderIter.__init__
        if getattr(made, "noted_by", None) is _iterators:
            return

        @functools.wraps(made)
        def noted(self: Any, *arguments: Any, **options: Any) -> None:
            made(self, *arguments, **options)
            with _lock, suppress(TypeError):  # one without a hash, of somebody's own, is iterated all the same
                _iterators.add(self)

        noted.noted_by = _iterators  # type: ignore[attr-defined]
        _BaseDataLoaderIter.__init__ = noted  # type: ignore[method-assign]


def iterated(state: Mapping[str, Any]) -> list[str]:
    """Names the loaders that have begun an epoch and not given all of it, but for those that `state` has, also inside
    an object that says its state by itself: that one counts the batches."""
    with _lock:
        found = list(_iterators)
    inside = [one._dataset for one in found if _inside(one)]
    known = {id(loader.dataset) for value in state.values() for loader in _loaders(value)} if inside else set()
    open_ones = [dataset for dataset in inside if id(dataset) not in known]
    return [f"a DataLoader over {type(dataset).__name__}" for dataset in open_ones]


def _loaders(value: Any, depth: int = 0) -> Iterator[DataLoader[Any]]:
    """Yields the loaders in a value. A large container holds none."""
    below: Iterable[Any] = ()
    if isinstance(value, DataLoader):
        yield value
    elif depth == _DEEPEST:
        return
    elif type(value) in (dict, list, tuple):
        below = value.values() if type(value) is dict else value
    elif is_stateful(value) and not isinstance(value, nn.Module | Optimizer):
        below = getattr(value, "__dict__", {}).values()
    if isinstance(below, Sized) and len(below) <= _MOST:
        for one in below:
            yield from _loaders(one, depth + 1)


def _inside(iterator: Any) -> bool:
    """Returns whether batches were given and more may come: how many there are not every sampler says."""
    given = iterator._num_yielded
    if not given or isinstance(iterator._dataset, IterableDataset):
        return bool(given)
    try:
        return bool(given < len(iterator))
    except (TypeError, NotImplementedError):
        return True
