"""Which leaves an optimizer of torch owns, and the one hook at which every optimizer's step waits.

The hook is torch's own, before every step of every optimizer of the process. It is installed while a Checkpointer
captures behind a fence, and holds no optimizer, so that copying and pickling one is what it was.

A hook may be bypassed: a compiled step has none, and a CUDA graph replays kernels alone. So an optimizer counts only if
its hook was seen to run since the save before. The compiler follows the hook once, before the first compiled step: that
is when this one waits.
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

_MOST = 100_000
"""Objects that a search for optimizers looks at."""


class _Compiled:
    """Set by code that torch.compile has made of an optimizer's step, where the hook is traced and not called."""

    ran = False


class OptimizerSteps:
    """Which optimizers were seen to step, process-wide."""

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
        held = known[0] if known is not None and known[0]() is optimizer else weakref.ref(optimizer)
        self._seen[mark] = (held, self.tick)

    def seen_since(self, optimizer: Optimizer, tick: int) -> bool:
        known = self._seen.get(id(optimizer))
        return known is not None and known[0]() is optimizer and known[1] > tick

    def graph(self, optimizer: Optimizer) -> None:
        """Its step is being recorded into a CUDA graph, which replays it without any hook."""
        self._graphed[id(optimizer)] = weakref.ref(optimizer)

    def graphed(self, optimizer: Optimizer) -> bool:
        known = self._graphed.get(id(optimizer))
        return known is not None and known() is optimizer


steps = OptimizerSteps()
_compiled = steps.compiled


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        _before_compiled()
        # Traced, once. What is compiled does no more than this, without a break in the graph.
        _compiled.ran = True
        return
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        steps.graph(optimizer)  # a capture may not wait for another stream
        return
    steps.see(optimizer)
    let_updates_pass()


def _before_compiled() -> None:
    """Called by the compiler, which takes it for a constant, while it traces a step: no compiled step has run yet, and
    every save from here on is eager."""
    let_updates_pass()
    _compiled.ran = True


os.register_at_fork(after_in_child=steps.disarm)


class TorchGate:
    """The optimizers in one state."""

    def __init__(self, state: Any, tell: Callable[[str], None]) -> None:
        self._state = state
        self._tell = tell
        self._told: set[str] = set()
        self._known: _Known | None = None
        self._without = 0
        """Captures at which there was no optimizer."""
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
            if self._without == PROBATION:  # the first captures are eager anyway, and one may be made later
                self._once(
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
            self._once(
                "an optimizer's step was compiled by torch.compile, which leaves out the hook that a fenced capture "
                "waits at: what optimizers own is captured eagerly"
            )
            return False
        if steps.graphed(optimizer):
            self._once(
                f"the step of {name} was recorded into a CUDA graph, which replays without hooks: what it owns is "
                "captured eagerly"
            )
            return False
        if not steps.seen_since(optimizer, self._before):
            self._once(
                f"{name} was not seen to step since the save before, or its steps pass by torch's hooks: what it owns "
                "is captured eagerly in such a save"
            )
            return False
        return True

    def _once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            self._tell(message)


class _Known:
    """What was found to be fenceable, as long as the same optimizers own it. Holds none of it: the state's tensors are
    known again by weak references. What is a new object at each save, like the state of a random generator, is never
    among it."""

    def __init__(
        self, optimizers: Sequence[Optimizer], sources: Sequence[Any], found: Mapping[int, torch.Tensor]
    ) -> None:
        """`found`: as `_among` gives it."""
        self.found = list(found)
        self._owners = _owners(optimizers)
        self._count = len(sources)
        self._held = [(at, weakref.ref(sources[at]), sources[at].is_contiguous()) for at in found]
        self._wholes = [weakref.ref(tensor) for tensor in found.values() if is_dtensor(tensor)]
        """They count what is done to their parts."""

    def holds(self, optimizers: Sequence[Optimizer], sources: Sequence[Any]) -> bool:
        return (
            len(sources) == self._count
            and _owners(optimizers) == self._owners
            and all(
                ref() is sources[at] and (not dense or sources[at].is_contiguous()) for at, ref, dense in self._held
            )
            and all(whole() is not None for whole in self._wholes)
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
"""What this process holds of a tensor that an optimizer owns, and the tensor itself: the same but for a DTensor."""


def _owned(optimizers: Iterable[Optimizer]) -> dict[int, _Owned]:
    """By the identity of what is held; without tensors whose changes nobody counts."""
    tensors = [tensor for optimizer in optimizers for tensor in tensors_of(optimizer) if not tensor.is_inference()]
    return {id(local): (local, tensor) for tensor in tensors for local in [local_of(tensor)]}


def _among(sources: Sequence[Any], owned: Mapping[int, _Owned]) -> dict[int, torch.Tensor]:
    """Positions of the sources that are owned, the very tensors or the same memory in the same form, and the tensors as
    optimizers have them."""
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
    """The parameters that it updates, and every tensor of its state."""
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
    """Weights that a forward pass changes in place: embeddings which keep their rows to a norm."""
    for module in modules:
        for one in module.modules():
            if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.max_norm is not None:
                yield one.weight


def found_in(state: Any) -> tuple[list[Optimizer], list[nn.Module]]:
    """The optimizers and the outermost modules in a state, as deep as its containers go."""
    optimizers: list[Optimizer] = []
    modules: list[nn.Module] = []
    waiting, seen = [state], set[int]()
    while waiting and len(seen) < _MOST:
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
