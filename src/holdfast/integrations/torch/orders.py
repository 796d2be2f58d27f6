"""What the order of a loader's samples comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from holdfast.integrations.torch.batch_sizes import index_sampler


def order_sampler(loader: DataLoader[Any]) -> Any:
    """The sampler that makes it: of batches, the one that they are made of."""
    found = index_sampler(loader)
    return found.sampler if isinstance(found, BatchSampler) else found


def order_name(loader: DataLoader[Any]) -> str:
    """That sampler's class; of one that can be told to shuffle, whether it does."""
    sampler = order_sampler(loader)
    name, shuffle = type(sampler).__name__, getattr(sampler, "shuffle", None)
    return f"{name}(shuffle={shuffle})" if isinstance(shuffle, bool) else name


def order_differs(loader: DataLoader[Any], state: Mapping[str, Any]) -> str:
    """In words, what makes the order another than that of a saved position; empty where nothing does, or an older
    version has saved it, which did not say."""
    here = order_name(loader)
    saved = state.get("order_of", here)
    return "" if saved == here else f"the order is that of {here}, and was that of {saved} when it was saved"
