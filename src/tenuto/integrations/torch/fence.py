"""Finds the leaves that torch optimizers own, and waits before every optimizer step.

The hook is torch's own, before every step of every optimizer of the process. It is installed while a Checkpointer
captures behind a fence, and keeps no reference to an optimizer, so copying and pickling one is unaffected.

A hook may be bypassed: a compiled step has none, and a CUDA graph replays only kernels. So an optimizer counts only if
its hook was seen to run since the previous save. The compiler traces the hook once, before the first compiled step; the
hook waits then.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tenuto.integrations.torch import device
from tenuto.integrations.torch.meshes import is_dtensor, local_of
from tenuto.state.encode.atoms import ENCODERS
from tenuto.state.update_barrier import PROBATION, let_updates_pass

_SEARCH_LIMIT = 100_000
"""The objects that a search for optimizers visits at most."""


class _Compiled:
    """Set by code that torch.compile made of an optimizer's step, where the hook is traced and not called."""

    ran = False


class OptimizerSteps:
    """The optimizers that were seen to step, process-wide."""

    def __init__(self) -> None:
        self.tick = 0
        self.compiled = _Compiled()
        self._handle: Any = None
        self._gates = 0
        self._seen: dict[int, tuple[weakref.ref[Optimizer], int]] = {}
        self._graphed: dict[int, weakref.ref[Optimizer]] = {}

    def enter(self) -> None:
        self._gates += 1
        if self._handle is None:
            torch.compiler.assume_constant_result(_before_compiled)  # type: ignore[no-untyped-call]  # loads the compiler
            self._handle = register_optimizer_step_pre_hook(_before_step)

    def leave(self) -> None:
        self._gates -= 1
        if self._gates <= 0:
            self.disarm()

    def disarm(self) -> None:
        self._gates = 0
        self._seen.clear()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def see(self, optimizer: Optimizer) -> None:
        self.tick += 1
        mark = id(optimizer)
        known = self._seen.get(mark)
        reference = known[0] if known is not None and known[0]() is optimizer else weakref.ref(optimizer)
        self._seen[mark] = (reference, self.tick)

    def seen_since(self, optimizer: Optimizer, tick: int) -> bool:
        known = self._seen.get(id(optimizer))
        return known is not None and known[0]() is optimizer and known[1] > tick

    def graph(self, optimizer: Optimizer) -> None:
        """Notes that a step is recorded into a CUDA graph, which replays it without hooks."""
        self._graphed[id(optimizer)] = weakref.ref(optimizer)

    def graphed(self, optimizer: Optimizer) -> bool:
        known = self._graphed.get(id(optimizer))
        return known is not None and known() is optimizer


steps = OptimizerSteps()
_compiled = steps.compiled


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        _before_compiled()
        # Traced once. Compiled code does only this, without a graph break.
        _compiled.ran = True
        return
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        steps.graph(optimizer)  # a capture must not wait for another stream
        return
    steps.see(optimizer)
    let_updates_pass()


def _before_compiled() -> None:
    """Waits while the compiler traces a step (it treats the call as a constant): no compiled step has run yet, and
    every later save is eager."""
    let_updates_pass()
    _compiled.ran = True


os.register_at_fork(after_in_child=steps.disarm)


class TorchGate:
    """The optimizers in one state."""

    def __init__(self, state: Any, report: Callable[[str], None]) -> None:
        self._state = state
        self._report = report
        self._reported: set[str] = set()
        self._known: _Known | None = None
        self._without = 0
        """The captures without an optimizer."""
        self._save = self._before = steps.tick
        steps.enter()
        self._leave = weakref.finalize(self, _leave, os.getpid())

    def close(self) -> None:
        self._leave()

    def begin_save(self) -> None:
        self._before, self._save = self._save, steps.tick

    def fenceable(self, sources: Sequence[Any]) -> Sequence[int]:
        optimizers, modules = found_in(self._state)
        if not optimizers:
            self._without += 1
            if self._without == PROBATION:  # the first captures are eager anyway, and an optimizer may be made later
                self._report_once(
                    "no optimizer of torch is found in the state (one inside an object of your own is not seen): "
                    "everything is captured eagerly"
                )
            return ()
        waiting = [optimizer for optimizer in optimizers if self._waits(optimizer)]
        if not waiting:
            return ()
        if self._known is None or not self._known.holds(waiting, sources):
            owned = _owned(waiting)
            for tensor in map(local_of, written_by_forward(modules)):
                owned.pop(id(tensor), None)
            found = _among(sources, owned)
            for position, tensor in found.items():
                if is_dtensor(tensor):
                    device.count_with(sources[position], tensor)
            self._known = _Known(waiting, sources, found)
        return self._known.found

    def _waits(self, optimizer: Optimizer) -> bool:
        name = type(optimizer).__name__
        if steps.compiled.ran:
            self._report_once(
                "an optimizer's step was compiled by torch.compile, which leaves out the hook that a fenced capture "
                "waits at: what optimizers own is captured eagerly"
            )
            return False
        if steps.graphed(optimizer):
            self._report_once(
                f"the step of {name} was recorded into a CUDA graph, which replays without hooks: what it owns is "
                "captured eagerly"
            )
            return False
        if not steps.seen_since(optimizer, self._before):
            self._report_once(
                f"{name} was not seen to step since the save before, or its steps pass by torch's hooks: what it owns "
                "is captured eagerly in such a save"
            )
            return False
        return True

    def _report_once(self, message: str) -> None:
        if message not in self._reported:
            self._reported.add(message)
            self._report(message)


class _Known:
    """The fenceable sources, valid while the same optimizers own them. Keeps only weak references to the state's
    tensors. An object that is new at each save, such as the state of a random generator, never matches."""

    def __init__(
        self, optimizers: Sequence[Optimizer], sources: Sequence[Any], found: Mapping[int, torch.Tensor]
    ) -> None:
        """`found`: as returned by `_among`."""
        self.found = list(found)
        self._owners = _owners(optimizers)
        self._count = len(sources)
        self._sources = [(at, weakref.ref(sources[at]), sources[at].is_contiguous()) for at in found]
        self._dtensors = [weakref.ref(tensor) for tensor in found.values() if is_dtensor(tensor)]
        """DTensors, which count the changes of their parts."""

    def holds(self, optimizers: Sequence[Optimizer], sources: Sequence[Any]) -> bool:
        return (
            len(sources) == self._count
            and _owners(optimizers) == self._owners
            and all(
                ref() is sources[at] and (not dense or sources[at].is_contiguous()) for at, ref, dense in self._sources
            )
            and all(whole() is not None for whole in self._dtensors)
        )


def _owners(optimizers: Sequence[Optimizer]) -> list[int]:
    return [
        id(one)
        for optimizer in optimizers
        for one in (optimizer, *(parameter for group in optimizer.param_groups for parameter in group["params"]))
    ]


def _leave(owner: int) -> None:
    if os.getpid() == owner:
        steps.leave()


gate = TorchGate


_Owned = tuple[torch.Tensor, torch.Tensor]
"""The memory of a tensor in this process, and the tensor as the optimizer has it: identical except for a DTensor."""


def _owned(optimizers: Iterable[Optimizer]) -> dict[int, _Owned]:
    """Returns the owned tensors by identity of their memory; without tensors whose changes are not counted."""
    tensors = [tensor for optimizer in optimizers for tensor in tensors_of(optimizer) if not tensor.is_inference()]
    return {id(local): (local, tensor) for tensor in tensors for local in [local_of(tensor)]}


def _among(sources: Sequence[Any], owned: Mapping[int, _Owned]) -> dict[int, torch.Tensor]:
    """Returns the positions of sources that are owned (the same tensor, or the same memory in the same form), with the
    tensors of the optimizers."""
    found: dict[int, torch.Tensor] = {}
    forms: dict[int, _Owned] | None = None
    for position, source in enumerate(sources):
        if (known := owned.get(id(source))) is not None:
            found[position] = known[1]
        elif isinstance(source, torch.Tensor) and source.layout is torch.strided and source.numel():
            if forms is None:
                forms = {
                    local.data_ptr(): (local, tensor)
                    for local, tensor in owned.values()
                    if local.layout is torch.strided and local.numel()
                }
            same = forms.get(source.data_ptr())
            if same is not None and _form(same[0]) == _form(source):
                found[position] = same[1]
    return found


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg())


def tensors_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yields the parameters that an optimizer updates, and every tensor of its state."""
    for group in optimizer.param_groups:
        yield from group["params"]
    for value in optimizer.state.values():
        yield from _tensors(value)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def written_by_forward(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """Yields weights that a forward pass changes in place: embeddings with a maximum norm."""
    for module in modules:
        for one in module.modules():
            if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.max_norm is not None:
                yield one.weight


def found_in(state: Any) -> tuple[list[Optimizer], list[nn.Module]]:
    """Returns the optimizers and the outermost modules in a state, at any depth of its containers."""
    optimizers: list[Optimizer] = []
    modules: list[nn.Module] = []
    waiting, seen = [state], set[int]()
    while waiting and len(seen) < _SEARCH_LIMIT:
        value = waiting.pop()
        kind = type(value)
        if kind in ENCODERS or kind is torch.Tensor or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Optimizer):
            optimizers.append(value)
        elif isinstance(value, nn.Module):
            modules.append(value)
        elif not isinstance(value, torch.Tensor):
            waiting.extend(_inside(value))
    return optimizers, modules


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | collections.deque):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, one.name) for one in dataclasses.fields(value) if hasattr(value, one.name)]
    return ()
