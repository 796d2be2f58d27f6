"""Where DeepSpeed's optimizers keep each parameter: which elements of which flat partition, and of which whole tensor.

ZeRO 1 and 2 flatten a group of parameters, and each rank has a run of that: the end of one parameter, some whole ones,
the beginning of another. ZeRO 3 gives each rank a run of every parameter. Either way what a rank has of a parameter is
a run of its elements, in row-major order, and so is the state that the optimizer keeps beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from tenuto.errors import StateError, UsageError
from tenuto.record import record
from tenuto.state.declarations import Shard, flat

FLAT: Final = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
"""The attribute with the flat partitions of ZeRO 3; of ZeRO 1 and 2; of ZeRO 1 with bfloat16 and float32 gradients."""


@record
class Piece:
    """What this rank has of one parameter: `length` elements from `start` on of partition number `partition` (they are
    those from `begin` on of the parameter). Without any, `length` is 0."""

    name: str
    shape: tuple[int, ...]
    partition: int
    start: int
    length: int
    begin: int

    def of(self, partition: torch.Tensor) -> Shard:
        """Returns the mark of this piece of a flat tensor, which shares its memory."""
        return flat(partition.detach().narrow(0, self.start, self.length), whole=self.shape, begin=self.begin)


def partitions(optimizer: Any) -> list[torch.Tensor]:
    """Returns the flat partitions of the master weights of a ZeRO optimizer. Raises UsageError for another one."""
    for name in FLAT:
        found = getattr(optimizer, name, None)
        if found is not None:
            return list(found)
    raise UsageError(
        f"{type(optimizer).__name__} of DeepSpeed keeps no partitions",
        subject="engine",
        hint="use ZeRO: zero_optimization.stage 1, 2 or 3 in DeepSpeed's configuration",
    )


def pieces(engine: Any) -> list[Piece]:
    """Returns this rank's piece of every parameter that the optimizer updates, in the module's order."""
    optimizer = engine.optimizer
    found = _of_stage_3(optimizer) if hasattr(optimizer, FLAT[0]) else _of_runs(optimizer)
    return [
        Piece(name, shape_of(parameter), *found[id(parameter)])
        for name, parameter in engine.module.named_parameters()
        if id(parameter) in found
    ]


def _of_runs(optimizer: Any) -> dict[int, tuple[int, int, int, int]]:
    """Returns partition, start, length and begin of each parameter of ZeRO 1 and 2."""
    groups = getattr(optimizer, "bit16_groups", None) or optimizer.bf16_groups
    found = {}
    for number, group in enumerate(groups):
        for parameter in group:
            mapping = parameter._hp_mapping
            found[id(parameter)] = (number, 0, 0, 0)
            if mapping is not None:
                here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
                found[id(parameter)] = (number, here.start, here.numel, there.start)
    return found


def _of_stage_3(optimizer: Any) -> dict[int, tuple[int, int, int, int]]:
    found = {}
    for number, group in enumerate(optimizer.fp16_groups):
        start = 0
        for parameter in group:
            begin, length = own_run(parameter)
            found[id(parameter)] = (number, start, length, begin)
            start += parameter.ds_tensor.ds_numel
    return found


def own_run(parameter: Any) -> tuple[int, int]:
    """Returns where this rank's part of a parameter of ZeRO 3 begins in it, and its length without padding."""
    padded = int(parameter.ds_tensor.ds_numel)
    rank = torch.distributed.get_rank(group=parameter.ds_process_group)
    begin = min(rank * padded, int(parameter.ds_numel))
    return begin, min(padded, int(parameter.ds_numel) - begin)


def shape_of(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


class OptimizerState:
    """The state that the optimizer inside a ZeRO optimizer keeps beside its flat partitions.

    DeepSpeed's optimizers make it at their first update. A restore needs its place before that: so it is made by an
    update without effect, and is taken back before the first real one where nothing was restored.
    """

    def __init__(self, optimizer: Any) -> None:
        self._zero = optimizer
        self._inner: torch.optim.Optimizer = optimizer.optimizer
        self._flat = partitions(optimizer)
        self._made = not any(self._inner.state.get(one) for one in self._flat)
        if self._made:
            self._make()
            self._inner.register_step_pre_hook(lambda *_: self._take_back())

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The options of each group of parameters."""
        return [{key: value for key, value in group.items() if key != "params"} for group in self._inner.param_groups]

    def set_groups(self, groups: list[dict[str, Any]]) -> None:
        for group, saved in zip(self._inner.param_groups, groups, strict=True):
            group.update(saved)

    def tensors(self) -> list[dict[str, torch.Tensor]]:
        """Returns for each partition the state that lies as it does."""
        found = []
        for one in self._flat:
            state = self._inner.state.get(one, {})
            found.append({key: value for key, value in state.items() if _alike(value, one)})
        return found

    def values(self) -> list[dict[str, Any]]:
        """Returns for each partition the state that does not, such as the count of steps.

        Raises StateError for tensors of another shape: which elements they belong to is not known.
        """
        found = []
        for one in self._flat:
            rest = {key: value for key, value in self._inner.state.get(one, {}).items() if not _alike(value, one)}
            for key, value in rest.items():
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    raise StateError(
                        f"the optimizer's {key} has the shape {list(value.shape)}, which is not that of its parameters",
                        subject="optimizer",
                        hint="with such an optimizer DeepSpeed's own save_checkpoint saves for as many ranks",
                    )
            found.append(rest)
        return found

    def set_values(self, values: list[dict[str, Any]]) -> None:
        """Sets what `values` returned, by the first of them for partitions that were not there."""
        self._made = False
        for number, one in enumerate(self._flat):
            state = self._inner.state[one]
            for key, value in values[min(number, len(values) - 1)].items():
                now = state.get(key)
                if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor):
                    state[key] = value.to(now.device, now.dtype)
                else:
                    state[key] = value

    def _take_back(self) -> None:
        if self._made:
            self._made = False
            for one in self._flat:
                self._inner.state.pop(one, None)

    def _make(self) -> None:
        groups = [dict(group) for group in self._inner.param_groups]
        for group, one in self._in_turn():
            before, rate = one.detach().clone(), group["lr"]
            one.grad = torch.zeros_like(one)
            group["params"] = [one]
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
            others = [(other, other["params"]) for other in self._inner.param_groups if other is not group]
            for other, _ in others:
                other["params"] = []
            self._inner.step()
            for other, parameters in others:
                other["params"] = parameters
            one.detach().copy_(before)
            one.grad = None
            for key, value in self._inner.state.get(one, {}).items():
                if key == "step":
                    self._inner.state[one][key] = torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0
        for group, before_it in zip(self._inner.param_groups, groups, strict=True):
            group.clear()
            group.update(before_it)

    def _in_turn(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        numbers = getattr(self._zero, "sub_group_to_group_id", None)
        for number, one in enumerate(self._flat):
            yield self._inner.param_groups[number if numbers is None else numbers[number]], one


def _alike(value: Any, partition: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == partition.shape
