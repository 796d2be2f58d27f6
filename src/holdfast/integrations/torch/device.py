"""Copying tensors into host memory: as torch does it itself, with its own threads, streams and kernels."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

from holdfast.integrations.torch import late
from holdfast.model.leaf import LeafSpec
from holdfast.state.contract import Bound, Buffer
from holdfast.state.ownership import LateCopies, Told

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    str(kind)[6:]: kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)
}
QUANTISED: Final = frozenset(name for name in TORCH_DTYPES if name.startswith(("qint", "quint")))
OPAQUE: Final = frozenset(
    kind
    for name, kind in TORCH_DTYPES.items()
    if name.startswith(("bits", "float4", "int", "uint")) and name not in
    {"int8", "int16", "int32", "int64", "int", "uint8", "uint16", "uint32", "uint64"}
)  # fmt: skip
"""Types that torch has no copy kernel for: copied as the bytes that they are."""


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or, of a type that torch cannot copy, its bytes in integers of the same size."""
    if tensor.dtype not in OPAQUE:
        return tensor
    return tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.int16)


def over(view: Buffer, kind: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor whose memory is `view` (writable, of the right length)."""
    if not view.size:
        return torch.empty(tuple(shape), dtype=kind)
    flat = torch.frombuffer(view, dtype=kind)
    return flat if len(shape) == 1 else flat.view(tuple(shape))


def writable(data: Buffer) -> Buffer:
    """The same bytes as an array that torch takes without a warning; whoever asks does not write them."""
    if data.flags.writeable:
        return data
    same: Buffer = np.ndarray((data.size,), np.uint8, (ctypes.c_uint8 * data.size).from_address(data.ctypes.data))  # type: ignore[arg-type]
    return same


class TorchBound:
    """Destinations in host memory for tensors of one device."""

    late_step = late.HOST_STEP
    on_device = False

    def __init__(self, specs: Sequence[LeafSpec], views: Sequence[Buffer]) -> None:
        kinds = {name: TORCH_DTYPES[name] for name in {spec.dtype for spec in specs}}
        self._targets = [over(view, kinds[spec.dtype], spec.shape) for spec, view in zip(specs, views, strict=True)]
        self._views = views
        self._opaque = not OPAQUE.isdisjoint(kinds.values())
        if self._opaque:
            self._targets = [raw(target) for target in self._targets]

    def copy(self, sources: Sequence[Any], start: int, stop: int) -> None:
        targets = self._targets
        with torch.no_grad():
            if self._opaque:
                for leaf in range(start, stop):
                    targets[leaf].copy_(raw(sources[leaf]))
                return
            for leaf in range(start, stop):
                targets[leaf].copy_(sources[leaf])

    def copy_part(self, source: Any, leaf: int, start: int, stop: int) -> None:
        # In this thread alone: parts are copied while another thread writes, and torch's threads wait for each other.
        content = raw(source).detach().reshape(-1).view(torch.uint8).numpy()
        np.positive(content[start:stop], out=self._views[leaf][start:stop])

    def splits(self, source: Any) -> bool:
        return bool(
            source.device.type == "cpu"  # of no other device is the address one of this process's memory
            and source.is_contiguous()
            and not source.is_conj()
            and not source.is_neg()
            and source.numel()
        )

    def wait(self) -> None:
        pass

    def can_wait(self, source: Any) -> bool:
        return bool(source.device.type == "cpu" and late.can_wait(source))

    def hold(self, source: Any) -> Any:
        return late.hold(source)

    def version(self, held: Any) -> int:
        return late.version(held)

    def late(self, parts: Sequence[Told], watched: Sequence[Told] = ()) -> LateCopies:
        return late.HostCopies(self, self._views, parts, watched)

    def compare(self, parts: Sequence[Told]) -> Callable[[], Sequence[bool]]:
        return late.compare_on_host(self._views, parts)


class AcceleratorBound(TorchBound):
    """Destinations for tensors of an accelerator: copies are queued on the current stream and run beside the host.

    The image is registered with the driver as pinned memory where that succeeds; else torch copies through its own
    staging memory, which is correct and slower.
    """

    late_step = late.DEVICE_STEP
    on_device = True

    def __init__(self, specs: Sequence[LeafSpec], views: Sequence[Buffer], device: torch.device) -> None:
        super().__init__(specs, views)
        self._device = device
        self._events: list[Any] = []
        _pin(self, views)

    def copy(self, sources: Sequence[Any], start: int, stop: int) -> None:
        targets = self._targets
        with torch.no_grad(), torch.cuda.device(self._device):
            for leaf in range(start, stop):
                # A bit left to the copy would be applied to the host's bytes at once, before they have arrived.
                targets[leaf].copy_(raw(sources[leaf]).resolve_conj().resolve_neg(), non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)

    def splits(self, source: Any) -> bool:
        return False

    def can_wait(self, source: Any) -> bool:
        return late.can_wait(source)

    def late(self, parts: Sequence[Told], watched: Sequence[Told] = ()) -> LateCopies:
        return late.DeviceCopies(self._device, self._views, parts, watched)

    def compare(self, parts: Sequence[Told]) -> Callable[[], Sequence[bool]]:
        return late.compare_on_device(self._device, self._views, parts)

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()
        self._events.clear()


_pinned: dict[int, int] = {}
"""Begin -> end of what this process has registered: registering twice is an error that the driver would report later,
at a call that has nothing to do with it."""


def _pin(owner: AcceleratorBound, views: Sequence[Buffer]) -> None:
    held = [view for view in views if view.size]
    if not held:
        return
    begin = min(view.ctypes.data for view in held) & ~4095
    end = max(view.ctypes.data + view.size for view in held)
    if any(begin < other_end and other_begin < end for other_begin, other_end in _pinned.items()):
        return
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(begin, end - begin, 0)) == 0:
        _pinned[begin] = end
        weakref.finalize(owner, _unpin, begin)


def _unpin(begin: int) -> None:
    _pinned.pop(begin, None)
    with contextlib.suppress(RuntimeError):
        torch.cuda.cudart().cudaHostUnregister(begin)  # type: ignore[no-untyped-call]


class TorchDevice:
    """Copies tensors of one torch device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.name = f"torch {device}"
        self.space = str(device)

    def bind(self, specs: Sequence[LeafSpec], views: Sequence[Buffer]) -> Bound:
        if self._device.type == "cuda":
            return AcceleratorBound(specs, views, self._device)
        return TorchBound(specs, views)


_devices: dict[torch.device, TorchDevice] = {}


def device_of(device: torch.device) -> TorchDevice:
    """What copies tensors of this device; one for each, so that leaves of one are copied together."""
    found = _devices.get(device)
    if found is None:
        found = _devices.setdefault(device, TorchDevice(device))
    return found
