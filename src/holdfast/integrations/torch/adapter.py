"""What represents torch's values: tensors, modules, optimizers, generators, and its small plain types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.errors import CorruptionError, Unserialisable
from holdfast.integrations.torch import modules, optimizer_restore, optimizers, sharded, tensors
from holdfast.integrations.torch.device import TORCH_DTYPES
from holdfast.integrations.torch.forms import PLAIN
from holdfast.integrations.torch.fully_sharded import settle
from holdfast.integrations.torch.looks import Entries
from holdfast.integrations.torch.wrappers import own_tensors
from holdfast.model.checkpoint import Json
from holdfast.model.leaf import LeafSpec
from holdfast.model.paths import escape, join
from holdfast.state.contract import Sink
from holdfast.state.declared import Shard, attached, declarations
from holdfast.state.nodes import ROOT, kind_of
from holdfast.state.registry import Refresh
from holdfast.state.restorer import Restorer, Thunk
from holdfast.state.writer import Writer

_SMALL: Final = (torch.Size, torch.dtype, torch.device)


def _small_node(value: Any) -> Json:
    if isinstance(value, torch.Size):
        return {"!": "torch.size", "v": [int(one) for one in value]}
    kind = "torch.dtype" if isinstance(value, torch.dtype) else "torch.device"
    return {"!": kind, "v": str(value).removeprefix("torch.") if kind == "torch.dtype" else str(value)}


def _small(node: Json, path: str) -> Any:
    try:
        if node["!"] == "torch.size":
            return torch.Size(node["v"])
        return TORCH_DTYPES[node["v"]] if node["!"] == "torch.dtype" else torch.device(node["v"])
    except (KeyError, TypeError, RuntimeError, ValueError) as error:
        raise CorruptionError(f"{path or ROOT}: no {node['!']}: {error}", subject=path) from None


class TorchAdapter:
    def claims(self, kind: type) -> bool:
        return issubclass(kind, (torch.Tensor, nn.Module, Optimizer, torch.Generator, *_SMALL))

    def plain(self, kind: type) -> bool:
        return issubclass(kind, _SMALL)

    def owners(self, value: Any, path: str) -> Iterable[tuple[Any, str]]:
        if isinstance(value, nn.Module):
            settle(value)
            return [(tensor, join(path, escape(name))) for _, name, tensor, _ in own_tensors(value)]
        return [(value, path or ROOT)] if isinstance(value, torch.Tensor) else []

    def encode(self, value: Any, path: str, writer: Writer) -> tuple[Json, Refresh]:
        if isinstance(value, torch.Tensor):
            return tensors.encode(value, path, writer)
        if isinstance(value, nn.Module):
            return modules.encode(value, path, writer)
        if isinstance(value, Optimizer):
            return optimizers.encode(value, path, writer)
        if isinstance(value, torch.Generator):
            return _generator_node(value, path, writer), lambda again, replay: _generator_node(again, path, replay)
        return _small_node(value), lambda again, _: _small_node(again)

    def encode_shard(self, value: Shard, path: str, writer: Writer) -> tuple[Json, Refresh]:
        if not isinstance(value.value, torch.Tensor):
            raise Unserialisable(f"{path or ROOT}: only a tensor can be a shard", subject=path)
        return sharded.encode_shard(value, path, writer)

    def encode_entries(
        self, entries: Mapping[str, Any], path: str, writer: Writer
    ) -> tuple[list[Json], Refresh] | None:
        if declarations() and any(attached(one) is not None for one in entries.values()):
            return None
        if not all(type(one) in PLAIN and one.layout is torch.strided for one in entries.values()):
            return None
        told = Entries(entries, path, writer)
        return told.pairs, told.again

    def restore(self, value: Any, node: Json, path: str, restorer: Restorer) -> Thunk:
        if isinstance(value, torch.Tensor):
            return tensors.restore(value, node, path, restorer)
        if isinstance(value, nn.Module):
            return modules.restore(value, node, path, restorer)
        if isinstance(value, Optimizer):
            return optimizer_restore.restore(value, node, path, restorer)
        if isinstance(value, torch.Generator):
            return _restore_generator(value, node, path, restorer)
        return restorer.rebuild(node, path) if restorer.takes(path) else lambda: value

    def restore_shard(self, value: Shard, node: Json, path: str, restorer: Restorer) -> Thunk:
        return sharded.restore_shard(value, node, path, restorer)

    def restore_all(
        self, values: Sequence[Any], nodes: Sequence[Json], paths: Sequence[str], restorer: Restorer
    ) -> bool:
        return tensors.restore_all(values, nodes, paths, restorer)

    def fresh(self, node: Json, path: str, restorer: Restorer) -> Thunk:
        kind = kind_of(node)
        if kind == "generator":
            return _fresh_generator(node, path, restorer)
        made = {
            "module": modules.fresh,
            "optimizer": optimizer_restore.fresh,
            "sparse": tensors.fresh_sparse,
            "subclass": tensors.fresh_subclass,
        }.get(kind)
        if made is not None:
            return made(node, path, restorer)
        value = _small(node, path)
        return lambda: value

    def allocate(self, spec: LeafSpec, node: Json, device: Any) -> tuple[Any, Sink]:
        return tensors.allocate(spec, device)

    def view(self, base: Any, node: Json) -> Any:
        return tensors.view(base, node)


def _generator_node(value: torch.Generator, path: str, writer: Writer) -> Json:
    return {"!": "generator", "device": value.device.type, "v": writer.encode(value.get_state(), path)}


def _restore_generator(value: torch.Generator, node: Json, path: str, restorer: Restorer) -> Thunk:
    if kind_of(node) != "generator" or node.get("device") != value.device.type:
        return restorer.mismatch(value, path, restorer.words(node), f"a {value.device.type} generator")
    if not restorer.takes(path):
        return lambda: value
    with restorer.on("cpu"):
        state = restorer.rebuild(node.get("v"), path)
    restorer.restored.append(path)
    restorer.later(path, lambda: value.set_state(state()))
    return lambda: value


def _fresh_generator(node: Json, path: str, restorer: Restorer) -> Thunk:
    with restorer.on("cpu"):
        state = restorer.rebuild(node.get("v"), path)
    return lambda: torch.Generator().set_state(state())


adapter: Final = TorchAdapter()
