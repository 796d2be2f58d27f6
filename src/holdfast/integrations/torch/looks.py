"""Many dense tensors looked at together: told at first, and told again at well under a microsecond each."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from holdfast.integrations.torch.forms import Look, address, look
from holdfast.integrations.torch.tensors import check, dense_leaf
from holdfast.model.checkpoint import Json
from holdfast.model.paths import join
from holdfast.state.nodes import segment
from holdfast.state.writer import Changed, Writer


class Looks:
    """Tensors in an order, and whether each still is what it was.

    They are not held: what the state replaces is to be freed.
    """

    def __init__(self) -> None:
        self._known: list[tuple[weakref.ref[torch.Tensor], int, type, Any, Look]] = []

    def first(self, tensor: torch.Tensor, path: str, writer: Writer) -> Json:
        """Tells the next tensor to `writer`: its node. Raises Unserialisable for one that has no bytes to save."""
        check(tensor, path)
        seen = look(tensor)
        node = dense_leaf(tensor, seen, path, writer)
        self._known.append((weakref.ref(tensor), address(tensor), type(tensor), tensor.layout, seen))
        return node

    def again(self, replay: Writer, values: Iterable[torch.Tensor]) -> None:
        """Tells the leaves to `replay`, in order. Raises Changed where a tensor differs in more than its values."""
        sources, addresses = replay.leaves.sources, replay.leaves.addresses
        for now, (known, place, kind, layout, seen) in zip(values, self._known, strict=True):
            here = now.data_ptr() if known() is now else 0
            if here == place:
                if (
                    now.shape != seen[1]
                    or now.stride() != seen[2]
                    or now.dtype is not seen[0]
                    or now.requires_grad is not seen[4]
                    or now.is_conj() is not seen[5]
                    or now.is_neg() is not seen[6]
                ):
                    raise Changed
            elif type(now) is not kind or now.layout is not layout or look(now) != seen:
                # Another object, or another memory behind the same one: everything may differ.
                raise Changed
            else:
                here = address(now)
            sources.append(now)
            addresses.append(here)


class Entries:
    """A dictionary of dense tensors under strings. `pairs`: as its node has them."""

    def __init__(self, held: Mapping[str, torch.Tensor], path: str, writer: Writer) -> None:
        self._keys = list(held)
        self._looks = Looks()
        self.pairs: list[Json] = [
            [key, self._looks.first(one, join(path, segment(key)), writer)] for key, one in held.items()
        ]

    def again(self, held: Mapping[Any, Any], replay: Writer) -> list[Json]:
        """Tells the leaves to `replay`; the pairs. Raises Changed where keys or tensors are others."""
        if list(held) != self._keys:
            raise Changed
        self._looks.again(replay, held.values())
        return self.pairs
