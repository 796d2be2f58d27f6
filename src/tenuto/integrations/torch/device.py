"""Copies tensors into host memory, with torch's own threads, streams and kernels.

Late copies run in the background behind a fence: on the host in a thread, on an accelerator on a stream of their own.
The accelerator's part has been run on one NVIDIA H100 (torch 2.11, CUDA 13.0): tests/cuda.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from itertools import accumulate
from typing import Any, Final, Protocol, cast

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from tenuto.model.leaf import LeafSpec
from tenuto.state.contract import Bound, Buffer
from tenuto.state.update_barrier import LateCopies, LateLeaf, Probe

HOST_STEP: Final = 4 << 20
DEVICE_STEP: Final = 32 << 20
"""Bytes per copy: bounds the device memory of a comparison, and with the short ones that are awaited together, to less
than twice as much, how long an urgent caller waits."""

_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_compare.restype = ctypes.c_int


_dtensors: Final[MutableMapping[torch.Tensor, weakref.ref[torch.Tensor]]] = WeakIdKeyDictionary()
"""A local tensor -> the DTensor whose memory it is, weakly."""


class _Parts(Protocol):
    def copy_part(self, source: Any, leaf: int, start: int, stop: int) -> None: ...


def count_with(local: torch.Tensor, dtensor: torch.Tensor) -> None:
    """Counts in-place changes of a DTensor as changes of its local tensor: torch counts them at the DTensor alone, and
    writes the local tensor below the counter."""
    _dtensors[local] = weakref.ref(dtensor)


def hold(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the same memory and change count, which survive when `.data` gives the tensor other
    memory."""
    retained = tensor.detach()
    if _dtensors and (dtensor := _dtensors.get(tensor)) is not None:
        retained._tenuto_dtensor = dtensor()  # type: ignore[attr-defined]
    return retained


def version(retained: torch.Tensor) -> int:
    """Returns how often the memory was changed in place, as far as torch counts it."""
    dtensor = getattr(retained, "_tenuto_dtensor", None)
    return int(retained._version + (dtensor._version if dtensor is not None else 0))


def can_wait(tensor: torch.Tensor) -> bool:
    """Returns whether parts of the tensor's bytes can be copied later, and its in-place changes are counted."""
    return bool(
        tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_inference()
        and tensor.numel()
    )


class HostCopies:
    """Late parts that the calling thread copies."""

    def __init__(
        self, bound: _Parts, views: Sequence[Buffer], parts: Sequence[LateLeaf], watched: Sequence[LateLeaf]
    ) -> None:
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


def compare_on_host(views: Sequence[Buffer], parts: Sequence[LateLeaf]) -> Callable[[], Sequence[bool]]:
    """Compares at once, bitwise (a NaN equals itself), without the interpreter lock."""
    found = [
        _compare(retained.data_ptr() + start, views[leaf].ctypes.data + start, stop - start) == 0
        for retained, leaf, start, stop in parts
    ]
    return lambda: found


def probe_on_host(parts: Sequence[LateLeaf]) -> Callable[[int], bool]:
    """Reads short parts of tensors in host memory. Whoever calls the result holds the tensors."""
    places = [(retained.data_ptr() + start, stop - start) for retained, _, start, stop in parts]
    taken = [ctypes.string_at(*place) for place in places]
    return lambda number: ctypes.string_at(*places[number]) == taken[number]


class DeviceCopies:
    """Late parts copied on a separate stream, after all work queued before.

    The host waits only in `copy`; `order` makes the current stream wait.
    """

    def __init__(
        self,
        device: torch.device,
        views: Sequence[Buffer],
        parts: Sequence[LateLeaf],
        watched: Sequence[LateLeaf],
        probe: DeviceProbe | None = None,
        *,
        targets: Sequence[torch.Tensor],
    ) -> None:
        """targets: tensors over `views`."""
        self._device = device
        self._events: list[Any] = []
        """For each part the one behind it, or behind the last of a few short ones: an event takes as long as a copy."""
        with torch.no_grad(), torch.cuda.device(device):
            before = torch.cuda.Event()  # type: ignore[no-untyped-call]
            before.record(torch.cuda.current_stream(device))
            stream = _side_stream(device)
            stream.wait_event(before)
            with torch.cuda.stream(stream):
                waiting = queued = 0
                for retained, leaf, start, stop in parts:
                    retained.record_stream(stream)  # keeps the memory from being reused while this stream reads it
                    if stop - start == views[leaf].size:
                        targets[leaf].copy_(raw(retained), non_blocking=True)
                    else:
                        target = torch.from_numpy(views[leaf][start:stop])
                        target.copy_(as_bytes(retained)[start:stop], non_blocking=True)
                    waiting, queued = waiting + 1, queued + stop - start
                    if queued >= DEVICE_STEP or len(self._events) + waiting == len(parts):
                        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                        done.record(stream)
                        self._events += [done] * waiting
                        waiting = queued = 0
                self.unchanged = compare_on_device(device, views, watched) if watched else lambda: ()
                if probe is not None:
                    probe.take_again()
                last = torch.cuda.Event()  # type: ignore[no-untyped-call]
                last.record(stream)
                self._last = last

    def copy(self, number: int) -> None:
        await_event(self._events[number])

    def order(self) -> bool:
        torch.cuda.current_stream(self._device).wait_event(self._last)
        return True


def compare_on_device(
    device: torch.device, views: Sequence[Buffer], parts: Sequence[LateLeaf]
) -> Callable[[], Sequence[bool]]:
    """Moves the image's parts to the device and compares them there, in the order of the current stream."""
    with torch.no_grad(), torch.cuda.device(device):
        unequal = []
        for retained, leaf, start, stop in parts:
            image = torch.from_numpy(views[leaf][start:stop]).to(device, non_blocking=True)
            unequal.append((image != as_bytes(retained)[start:stop]).any())
        found = _Answer(device, torch.stack(unequal))

    return lambda: [not one for one in found().tolist()]


class DeviceProbe:
    """Short parts of late leaves, read twice: at the save, and behind the copies. A kernel or few for all of them.

    Called, it waits until both were read. The second time is before any update, which is ordered behind it.
    """

    def __init__(self, device: torch.device, parts: Sequence[LateLeaf]) -> None:
        self._device = device
        self._parts = [as_bytes(retained)[start:stop] for retained, _, start, stop in parts]
        self._ends = list(accumulate(stop - start for _, _, start, stop in parts))
        self._answer: _Answer | None = None
        self._changed: list[bool] | None = None
        with torch.no_grad(), torch.cuda.device(device):
            self._taken = torch.cat(self._parts)  # on the stream of the training: what it queues later is not in it

    def take_again(self) -> None:
        """Reads the parts again in the order of the current stream, which waits for the first time already."""
        self._answer = _Answer(self._device, torch.cat(self._parts) != self._taken)
        self._parts = []

    def __call__(self, number: int) -> bool:
        if self._changed is None:
            if self._answer is None:
                return True  # nothing was copied, so nothing can be torn
            unequal = self._answer().numpy()
            begins = [0, *self._ends[:-1]]
            self._changed = [bool(unequal[begin:end].any()) for begin, end in zip(begins, self._ends, strict=True)]
        return not self._changed[number]


class _Answer:
    """Booleans that the current stream has computed, on their way to the host in its order: `tolist()` would go by the
    stream of the thread that asks, behind all that training has queued there."""

    def __init__(self, device: torch.device, found: torch.Tensor) -> None:
        self._found = found.to("cpu", non_blocking=True)  # torch takes pinned memory for it
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record(torch.cuda.current_stream(device))

    def __call__(self) -> torch.Tensor:
        await_event(self._done)
        return self._found


def await_event(event: Any) -> None:
    """Blocks until the device has come to an event.

    While any thread records a CUDA graph, the driver refuses such a wait in every other thread, and spoils the graph,
    unless the waiting thread asks to be left out.
    """
    with _beside_recording():
        event.synchronize()


_RELAXED: Final = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""


@contextlib.contextmanager
def _beside_recording() -> Iterator[None]:
    """Makes calls of this thread's independent of graphs that others record."""
    exchange = _capture_mode()
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@functools.cache
def _capture_mode() -> Callable[[Any], int] | None:
    try:
        return cast(Callable[[Any], int], ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode)
    except (OSError, AttributeError):
        return None  # ROCm, whose driver has another name


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


_streams: dict[torch.device, Any] = {}


def _side_stream(device: torch.device) -> Any:
    """Returns the one side stream of a device: saves follow one another."""
    found = _streams.get(device)
    if found is None:
        found = _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return found


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
"""Types without a copy kernel in torch: copied as raw bytes."""


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or for a type that torch cannot copy its bytes as integers of the same size."""
    if tensor.dtype not in OPAQUE:
        return tensor
    return tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.int16)


def over(view: Buffer, kind: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Returns a tensor over the memory `view` (writable, of the right length)."""
    if not view.size:
        return torch.empty(tuple(shape), dtype=kind)
    flat = torch.frombuffer(view, dtype=kind)
    return flat if len(shape) == 1 else flat.view(tuple(shape))


def writable(data: Buffer) -> Buffer:
    """Returns the same bytes as an array that torch accepts without a warning. The caller does not write to it."""
    if data.flags.writeable:
        return data
    same: Buffer = np.ndarray((data.size,), np.uint8, (ctypes.c_uint8 * data.size).from_address(data.ctypes.data))  # type: ignore[arg-type]
    return same


class TorchBound:
    """Destinations in host memory for tensors of one device."""

    late_step = HOST_STEP
    on_device = False

    def __init__(self, specs: Sequence[LeafSpec], views: Sequence[Buffer]) -> None:
        kinds = {name: TORCH_DTYPES[name] for name in {spec.dtype for spec in specs}}
        with torch.inference_mode(False):  # whoever makes the plan may be in it, and who copies later not
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
            source.device.type == "cpu"  # addresses of other devices are not in this process's memory
            and source.is_contiguous()
            and not source.is_conj()
            and not source.is_neg()
            and source.numel()
        )

    def wait(self) -> None:
        pass

    def can_wait(self, source: Any) -> bool:
        return bool(source.device.type == "cpu" and can_wait(source))

    def hold(self, source: Any) -> Any:
        return hold(source)

    def version(self, retained: Any) -> int:
        return version(retained)

    def late(
        self, parts: Sequence[LateLeaf], watched: Sequence[LateLeaf] = (), probe: Probe | None = None
    ) -> LateCopies:
        return HostCopies(self, self._views, parts, watched)

    def probe(self, parts: Sequence[LateLeaf]) -> Probe:
        return probe_on_host(parts)

    def compare(self, parts: Sequence[LateLeaf]) -> Callable[[], Sequence[bool]]:
        return compare_on_host(self._views, parts)


class AcceleratorBound(TorchBound):
    """Destinations for tensors of an accelerator. Copies are queued on the current stream and run in parallel with the
    host.

    The image is registered with the driver as pinned memory if possible; else torch copies through its own staging
    memory, which is correct but slower.
    """

    late_step = DEVICE_STEP
    on_device = True

    def __init__(
        self, specs: Sequence[LeafSpec], views: Sequence[Buffer], device: torch.device, *, stays: bool = True
    ) -> None:
        super().__init__(specs, views)
        self.device = device
        self._events: list[Any] = []
        if stays:
            _pin(self, views)

    def copy(self, sources: Sequence[Any], start: int, stop: int) -> None:
        targets = self._targets
        with torch.no_grad(), torch.cuda.device(self.device):
            for leaf in range(start, stop):
                # A lazy conjugate or negative bit would be applied to the host's bytes at once, before they have
                # arrived.
                targets[leaf].copy_(raw(sources[leaf]).resolve_conj().resolve_neg(), non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)

    def splits(self, source: Any) -> bool:
        return False

    def can_wait(self, source: Any) -> bool:
        return can_wait(source)

    def late(
        self, parts: Sequence[LateLeaf], watched: Sequence[LateLeaf] = (), probe: Probe | None = None
    ) -> LateCopies:
        read = probe if isinstance(probe, DeviceProbe) else None
        return DeviceCopies(self.device, self._views, parts, watched, read, targets=self._targets)

    def probe(self, parts: Sequence[LateLeaf]) -> Probe:
        return DeviceProbe(self.device, parts)

    def compare(self, parts: Sequence[LateLeaf]) -> Callable[[], Sequence[bool]]:
        return compare_on_device(self.device, self._views, parts)

    def wait(self) -> None:
        for event in self._events:
            await_event(event)
        self._events.clear()


_pinned: dict[tuple[int, int], int] = {}
"""Begin and end of the images this process registered -> those who copy into it. An image is registered as a whole and
once: a copy into memory of which a part is registered fails, and the driver reports a second registration late, at an
unrelated call."""


def _pin(owner: AcceleratorBound, views: Sequence[Buffer]) -> None:
    image = next((_image_of(view) for view in views if view.size), None)
    if image is None:
        return
    if image in _pinned:
        _pinned[image] += 1
    else:
        begin, end = image
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostRegister(begin, end - begin, 0)):
            _forget_error(owner)
            return
        _pinned[image] = 1
    weakref.finalize(owner, _unpin, image)


def _image_of(view: Buffer) -> tuple[int, int]:
    """Returns begin and end of the memory that a view is cut from."""
    whole = view.base if isinstance(view.base, np.ndarray) else view
    return whole.ctypes.data, whole.ctypes.data + whole.nbytes


def _forget_error(bound: AcceleratorBound) -> None:
    """The runtime keeps the error of a call that failed, and torch raises it at the next kernel that it launches: here,
    and not in training."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=bound.device)


def _unpin(image: tuple[int, int]) -> None:
    _pinned[image] -= 1
    if _pinned[image]:
        return
    del _pinned[image]
    with contextlib.suppress(RuntimeError), _beside_recording():
        torch.cuda.cudart().cudaHostUnregister(image[0])  # type: ignore[no-untyped-call]


class TorchDevice:
    """Copies tensors of one torch device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.name = f"torch {device}"
        self.space = str(device)

    def bind(self, specs: Sequence[LeafSpec], views: Sequence[Buffer], *, stays: bool = True) -> Bound:
        if self._device.type == "cuda":
            return AcceleratorBound(specs, views, self._device, stays=stays)
        return TorchBound(specs, views)


_devices: dict[torch.device, TorchDevice] = {}


def device_of(device: torch.device) -> TorchDevice:
    """Returns the copier for a device; one each, so that leaves of a device are copied together."""
    found = _devices.get(device)
    if found is None:
        found = _devices.setdefault(device, TorchDevice(device))
    return found
