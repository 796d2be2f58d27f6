"""Copies that run beside training, behind a fence: by a thread on the host, on a stream of their own on an accelerator.

The accelerator's half has been run against fakes only, on no device yet.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

from holdfast.state.contract import Buffer
from holdfast.state.ownership import Told

HOST_STEP: Final = 4 << 20
DEVICE_STEP: Final = 32 << 20
"""Bytes of one copy: how long somebody in a hurry waits for it, and how much memory of a device a comparison takes."""

_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_compare.restype = ctypes.c_int


_wholes: Final[MutableMapping[torch.Tensor, weakref.ref[torch.Tensor]]] = WeakIdKeyDictionary()
"""A local tensor -> the DTensor that it is the memory of, weakly."""


class _Parts(Protocol):
    def copy_part(self, source: Any, leaf: int, start: int, stop: int) -> None: ...


def count_with(local: torch.Tensor, whole: torch.Tensor) -> None:
    """From now on what is done in place to a DTensor counts as a change of its local tensor: torch counts it at the
    DTensor alone, and writes the local tensor below what counts."""
    _wholes[local] = weakref.ref(whole)


def hold(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory and the same count of changes, also when the tensor is given other memory through `.data`."""
    held = tensor.detach()
    if _wholes and (whole := _wholes.get(tensor)) is not None:
        held._holdfast_whole = whole()  # type: ignore[attr-defined]
    return held


def version(held: torch.Tensor) -> int:
    """How often the memory was changed in place, as far as torch counts it."""
    whole = getattr(held, "_holdfast_whole", None)
    return int(held._version + (whole._version if whole is not None else 0))


def can_wait(tensor: torch.Tensor) -> bool:
    """Whether parts of the tensor's bytes can be copied later, and its changes in place are counted."""
    return bool(
        tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_inference()
        and tensor.numel()
    )


class HostCopies:
    """Parts that the calling thread copies."""

    def __init__(self, bound: _Parts, views: Sequence[Buffer], parts: Sequence[Told], watched: Sequence[Told]) -> None:
        self._bound = bound
        self._views = views
        self._parts = parts
        self._watched = watched

    def copy(self, number: int) -> None:
        self._bound.copy_part(*self._parts[number])

    def unchanged(self) -> Sequence[bool]:
        return compare_on_host(self._views, self._watched)()

    def order(self) -> bool:
        return False


def compare_on_host(views: Sequence[Buffer], parts: Sequence[Told]) -> Callable[[], Sequence[bool]]:
    """Compares at once, bit for bit (a NaN equals itself), without holding the interpreter."""
    found = [
        _compare(held.data_ptr() + start, views[leaf].ctypes.data + start, stop - start) == 0
        for held, leaf, start, stop in parts
    ]
    return lambda: found


class DeviceCopies:
    """Parts that a stream of their own copies, once what was asked for before has been done.

    The host waits only where it is told to (`copy`); `order` makes the current stream wait.
    """

    def __init__(
        self, device: torch.device, views: Sequence[Buffer], parts: Sequence[Told], watched: Sequence[Told]
    ) -> None:
        self._device = device
        self._events: list[Any] = []
        with torch.no_grad(), torch.cuda.device(device):
            before = torch.cuda.Event()  # type: ignore[no-untyped-call]
            before.record(torch.cuda.current_stream(device))
            stream = _side_stream(device)
            stream.wait_event(before)
            with torch.cuda.stream(stream):
                for held, leaf, start, stop in parts:
                    held.record_stream(stream)  # its memory is given to nobody else while this stream reads it
                    target = torch.from_numpy(views[leaf][start:stop])
                    target.copy_(as_bytes(held)[start:stop], non_blocking=True)
                    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    done.record(stream)
                    self._events.append(done)
                self.unchanged = compare_on_device(device, views, watched) if watched else lambda: ()
                last = torch.cuda.Event()  # type: ignore[no-untyped-call]
                last.record(stream)
                self._last = last

    def copy(self, number: int) -> None:
        self._events[number].synchronize()

    def order(self) -> bool:
        torch.cuda.current_stream(self._device).wait_event(self._last)
        return True


def compare_on_device(
    device: torch.device, views: Sequence[Buffer], parts: Sequence[Told]
) -> Callable[[], Sequence[bool]]:
    """The image's parts go to the device and are compared there, in the order of the current stream."""
    with torch.no_grad(), torch.cuda.device(device):
        unequal = []
        for held, leaf, start, stop in parts:
            image = torch.from_numpy(views[leaf][start:stop]).to(device, non_blocking=True)
            unequal.append((image != as_bytes(held)[start:stop]).any())
        found = torch.stack(unequal)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(device))

    def verdict() -> Sequence[bool]:
        done.synchronize()
        return [not one for one in found.tolist()]

    return verdict


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


_streams: dict[torch.device, Any] = {}


def _side_stream(device: torch.device) -> Any:
    """One for each device: saves follow one another."""
    found = _streams.get(device)
    if found is None:
        found = _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return found
