"""Finds the position of a torch loader: which kind a loader is, and which part of its order can be repeated."""

from __future__ import annotations

from typing import Any, Final

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from tenuto.integrations.torch.data import resumable
from tenuto.integrations.torch.data.prepared import PreparedPosition, is_divided, is_prepared, plain, reads_elsewhere
from tenuto.integrations.torch.data.replay import ReplayPosition, index_sampler, order_sampler
from tenuto.integrations.torch.data.sampler import ResumableSampler
from tenuto.integrations.torch.data.stateful import StatefulLoaderPosition, StreamPosition
from tenuto.integrations.torch.rng import is_seedable
from tenuto.state.position.positions import DataPosition, RestartingPosition, has_state, stream_gaps

REPEATABLE: Final = frozenset(
    {SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler, ResumableSampler}
)
"""Samplers whose order follows from generators, seed and epoch alone. Not subclasses: they may do anything."""

DRAWN: Final = frozenset({RandomSampler, SubsetRandomSampler, WeightedRandomSampler})
"""The ones among them that draw a new order each time. torchdata saves only the state of its own RandomSampler: for
these it requests a new order, and skips as many samples of it."""

PREPARED: Final = (
    "{name} wraps a loader in a way that is not known here; pass the DataLoader itself, as it was before it was wrapped"
)
STATEFUL_HINT: Final = "torchdata's StatefulDataLoader keeps it"


def attach(loader: Any) -> DataPosition | None:
    """Returns the position of a DataLoader or a subclass, such as torchdata's StatefulDataLoader; None for anything
    else.

    accelerate's prepared loaders only say that they are DataLoaders (`__class__`). Anything else that does cannot be
    positioned: its own state, where it has one, may leave the order out.
    """
    if not isinstance(loader, DataLoader):
        return None
    if (counting := resumable.position_of(loader)) is not None:
        return counting
    if is_prepared(loader):
        return _of_prepared(loader)
    if not issubclass(type(loader), DataLoader):
        return RestartingPosition(loader, PREPARED.format(name=type(loader).__name__))
    if has_state(loader):
        return _of_stateful(loader)
    if isinstance(loader.dataset, IterableDataset):
        return _of_stream(loader)
    return ReplayPosition(loader, _unrepeatable(loader))


def _of_stateful(loader: DataLoader[Any]) -> DataPosition:
    sampler = _sampler(loader)
    name = type(sampler).__name__
    if isinstance(loader.dataset, IterableDataset) or _is_torchdatas(type(sampler)) or has_state(sampler):
        return StatefulLoaderPosition(loader, stream_gaps(loader.dataset))
    if type(sampler) in DRAWN and _is_torchdatas(type(loader).__iter__):
        if not has_state(loader.dataset):
            return ReplayPosition(loader, _unrepeatable(loader))
        reason = f"the order of {name} is drawn again by {type(loader).__name__}: shuffle=True has one that it keeps"
        return StatefulLoaderPosition(loader, (reason,))
    if type(sampler) not in REPEATABLE:
        caveat = f"the order of {name} is kept only if its iterator has a state_dict, or seed and epoch make it"
        return StatefulLoaderPosition(loader, (), (caveat,))
    return StatefulLoaderPosition(loader)


def _of_prepared(loader: Any) -> DataPosition:
    inside = plain(loader.base_dataloader)
    if reads_elsewhere(loader):
        return PreparedPosition(loader, None)
    if not isinstance(inside.dataset, IterableDataset):
        reasons = _unrepeatable(inside)
        return PreparedPosition(loader, ReplayPosition(inside, reasons))
    name = type(inside.dataset).__name__
    reasons = stream_gaps(inside.dataset)
    if not has_state(inside.dataset):
        reasons = (f"{name} is an IterableDataset without state_dict, so an interrupted epoch starts again",)
    elif inside.num_workers:
        reasons = (f"the state of {name} lies in the loader's workers, so an interrupted epoch starts again",)
    return PreparedPosition(loader, None, reasons)


def _sampler(loader: DataLoader[Any]) -> Any:
    """Returns the source of the order."""
    found = index_sampler(loader)
    known = type(found) is BatchSampler or (isinstance(found, BatchSampler) and _is_torchdatas(type(found)))
    return order_sampler(loader) if known or is_divided(found) else found


def _is_torchdatas(what: Any) -> bool:
    return bool(what.__module__.partition(".")[0] == "torchdata")


def _unrepeatable(loader: DataLoader[Any]) -> tuple[str, ...]:
    """Returns why the order of this loader's batches may not repeat; empty if it does."""
    reasons = []
    sampler, iteration = _sampler(loader), type(loader).__iter__
    if type(sampler) not in REPEATABLE and not is_seedable(sampler):
        note = f"its own state is not kept ({STATEFUL_HINT})" if has_state(sampler) else "it has no state_dict"
        reasons.append(
            f"the order of {type(sampler).__name__} is repeated only if it follows from the global generators; {note}"
        )
    if iteration is not DataLoader.__iter__ and not _is_torchdatas(iteration):
        reasons.append(f"{type(loader).__name__} iterates in a way of its own, and has no state_dict")
    if loader.num_workers > 1 and not getattr(loader, "in_order", True):
        reasons.append("in_order=False delivers batches in whatever order the workers finish")
    return tuple(reasons)


def _of_stream(loader: DataLoader[Any]) -> DataPosition:
    dataset = loader.dataset
    if not has_state(dataset):
        return RestartingStream(loader, f"{type(dataset).__name__} is an IterableDataset without state_dict")
    if loader.num_workers:
        return RestartingStream(
            loader, f"the state of {type(dataset).__name__} lies in the loader's workers; {STATEFUL_HINT}"
        )
    return StreamPosition(loader, stream_gaps(dataset))


class RestartingStream(RestartingPosition):
    """A DataLoader over a stream that cannot be positioned."""

    _has_length = False
