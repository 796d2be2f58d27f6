"""Which DataLoaders this process iterates, and which of them it is in the middle of, whoever iterates them.

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

from tenuto.concurrency.interruption import undisturbed
from tenuto.integrations.torch import optimizer_steps
from tenuto.integrations.torch.data.replay import COUNTED
from tenuto.integrations.torch.data.resumable import position_of
from tenuto.state.declarations import MARKS
from tenuto.state.frameworks import is_stateful

_iterators: weakref.WeakSet[Any] = weakref.WeakSet()
_begun: dict[int, tuple[int, weakref.ref[Any], str]] = {}
"""Each loader that was ever iterated, by its address: the number of its last iterator, and its data set in words."""
_lock = threading.Lock()
_LOADER: Final = "_tenuto_loader"
_MOST: Final = 64
_DEEPEST: Final = 3
"""Containers and objects around a loader, at most."""


def follow() -> int:
    """Begins to note iterators, and what optimizers leave behind, once per process. Returns the number of the last
    iterator so far, for `begun`."""
    optimizer_steps.follow()
    with _lock:
        made = _BaseDataLoaderIter.__init__
        if getattr(made, "noted_by", None) is _iterators:
            return _last()

        @functools.wraps(made)
        def noted(self: Any, loader: Any, *arguments: Any, **options: Any) -> None:
            made(self, loader, *arguments, **options)
            _note(self, loader)

        noted.noted_by = _iterators  # type: ignore[attr-defined]
        _BaseDataLoaderIter.__init__ = noted  # type: ignore[method-assign]
        return _last()


def _last() -> int:
    return max((number for number, _, _ in _begun.values()), default=0)


def _note(iterator: Any, loader: Any) -> None:
    # A signal that comes here waits: what it saves asks for the same lock, in the same thread.
    if loader.__dict__.get(COUNTED):
        return
    with undisturbed, _lock, suppress(TypeError):  # one without a hash, of somebody's own, is iterated all the same
        iterator.__dict__[_LOADER] = id(loader)
        _begun[id(loader)] = (_last() + 1, weakref.ref(loader), _words(loader.dataset))
        _iterators.add(iterator)


def begun(state: Mapping[str, Any], since: int) -> list[str]:
    """Names the loaders that were iterated after `follow` returned `since`, but for those that `state` has."""
    with _lock:
        found = [(loader(), words) for number, loader, words in _begun.values() if number > since]
    known = _known(state) if found else set()
    return [words for loader, words in found if loader is None or id(loader.dataset) not in known]


def iterated(state: Mapping[str, Any], data: Any = None) -> list[str]:
    """Names the loaders that have begun an epoch and not given all of it, but for `data` and those that `state` has,
    also inside an object that says its state by itself: that one counts the batches."""
    if data is not None and not isinstance(data, DataLoader):
        return []  # a trainer's own, which may take batches from any loader
    with _lock:
        found = [one for one in _iterators if one.__dict__.get(_LOADER) != id(data)]
    inside = [one._dataset for one in found if _inside(one)]
    known = _known(state) if inside else set()
    return [_words(dataset) for dataset in inside if id(dataset) not in known]


def _words(dataset: Any) -> str:
    return f"a DataLoader over {type(dataset).__name__}"


def _known(state: Mapping[str, Any]) -> set[int]:
    return {id(loader.dataset) for value in state.values() for loader in loaders(value)}


def loaders(value: Any, depth: int = 0) -> Iterator[DataLoader[Any]]:
    """Yields the loaders in a value. A large container holds none."""
    below: Iterable[Any] = ()
    if type(value) in MARKS:
        value = value.value
    if isinstance(value, DataLoader):
        counting = position_of(value)
        if counting is None or counting.iterated:  # one that nobody iterates counts nothing
            yield value
    elif depth == _DEEPEST:
        return
    elif type(value) in (dict, list, tuple):
        below = value.values() if type(value) is dict else value
    elif is_stateful(value) and not isinstance(value, nn.Module | Optimizer):
        below = getattr(value, "__dict__", {}).values()
    if isinstance(below, Sized) and len(below) <= _MOST:
        for one in below:
            yield from loaders(one, depth + 1)


def _inside(iterator: Any) -> bool:
    """Returns whether batches were given and more may come: how many there are not every sampler says."""
    given = iterator._num_yielded
    if not given or isinstance(iterator._dataset, IterableDataset):
        return bool(given)
    try:
        return bool(given < len(iterator))
    except (TypeError, NotImplementedError):
        return True
