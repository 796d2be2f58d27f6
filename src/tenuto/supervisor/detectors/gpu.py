"""NVIDIA GPUs, by NVML: lost, Xid errors, uncorrectable memory errors, heat, throttling, and memory that is used up.

NVML comes with the extra `gpu`; without it, or without a driver, nothing is sampled. Where NVML gives no events, Xid
errors are read from the kernel's log, if this user may.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from tenuto.supervisor.detectors.contract import Finding, Sample
from tenuto.supervisor.detectors.trend import Streaks, Trend
from tenuto.units import size

FATAL: Final = frozenset({48, 62, 64, 74, 79, 92, 94, 95, 119, 120, 140})
"""Xid errors after which a process cannot go on with the device: of its memory, its links, its firmware, or because it
is gone (NVIDIA, "XID Errors"). The others are mostly the application's own (13, 31, 43, 45)."""
GONE: Final = 79
SLOWED: Final = 0x08 | 0x80
HEATED: Final = 0x40
"""Reasons for which clocks are lowered: by hardware, for want of power; by hardware, for heat."""
NEAR: Final = 3.0
"""Degrees below the temperature at which clocks are lowered."""
IN_A_ROW: Final = 3
SCARCE: Final = 0.02
SPAN_S: Final = 60.0
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_KERNEL_LOG: Final = "/dev/kmsg"
_XID: Final = re.compile(rb"NVRM: Xid \(PCI:([0-9a-f:]+)[^)]*\): (\d+)", re.I)


class Gpu:
    source: Final = "gpu"
    period_s: Final = 10.0

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: dict[int, Any] = {}
        self._events: Any = None
        self._log: int | None = None
        self._ecc: dict[str, float] = {}
        self._free: dict[str, Trend] = {}
        self._streaks = Streaks()

    # -- the half that samples

    def sample(self) -> Mapping[str, float] | None:
        if self._nvml is None and not self._begin():
            return None
        values: dict[str, float] = {}
        for index, handle in self._handles.items():
            values |= {f"{index}.{name}": value for name, value in self._device(handle)}
        for index, number in self._xids():
            worse = values.get(f"{index}.xid", 0.0) not in FATAL
            values |= {f"{index}.xid": number} if worse else {}
        return values

    def _begin(self) -> bool:
        try:
            import pynvml
        except ImportError:
            return False
        try:
            pynvml.nvmlInit()
            visible = _visible(os.environ.get(VISIBLE), pynvml.nvmlDeviceGetCount())
            for one in visible:
                by_index = isinstance(one, int)
                get = pynvml.nvmlDeviceGetHandleByIndex if by_index else pynvml.nvmlDeviceGetHandleByUUID
                handle = get(one)
                self._handles[pynvml.nvmlDeviceGetIndex(handle)] = handle
        except pynvml.NVMLError:
            return False
        self._nvml = pynvml
        if not self._handles:
            return False
        try:
            self._events = pynvml.nvmlEventSetCreate()
            for handle in self._handles.values():
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._events)
        except pynvml.NVMLError:
            self._events = None
            with contextlib.suppress(OSError):
                self._log = os.open(_KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.lseek(self._log, 0, os.SEEK_END)
        return True

    def _device(self, handle: Any) -> Iterator[tuple[str, float]]:
        nvml = self._nvml
        ecc = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        readings: dict[str, Callable[[], Any]] = {
            "temperature": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "slowdown_temperature": lambda: nvml.nvmlDeviceGetTemperatureThreshold(
                handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
            ),
            "throttled": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
            "ecc_uncorrectable": lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, *ecc),
            "memory_free_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).free,
            "memory_total_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total,
            "utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        }
        for name, read in readings.items():
            try:
                yield name, float(read())
            except nvml.NVMLError as error:
                if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                    yield "lost", 1.0
                    return

    def _xids(self) -> Iterator[tuple[int, float]]:
        """Yields the Xid errors since the last reading, with the index of the device."""
        nvml = self._nvml
        while self._events is not None:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                yield nvml.nvmlDeviceGetIndex(event.device), float(event.eventData)
            except nvml.NVMLError:
                return  # there is none any more
        while self._log is not None:
            try:
                match = _XID.search(os.read(self._log, 8192))
            except OSError:  # read to its end, or overwritten meanwhile
                return
            if match is not None:
                with contextlib.suppress(nvml.NVMLError):
                    handle = nvml.nvmlDeviceGetHandleByPciBusId(f"{match[1].decode()}.0")
                    index = nvml.nvmlDeviceGetIndex(handle)
                    if index in self._handles:
                        yield index, float(match[2])

    # -- the half that judges

    def judge(self, sample: Sample) -> Sequence[Finding]:
        if sample.source != self.source:
            return ()
        return [one for index, values in sample.by_thing().items() for one in self._found(index, values, sample.at)]

    def _found(self, index: str, values: Mapping[str, float], at: float) -> Iterator[Finding]:
        gpu, xid = f"GPU {index}", int(values.get("xid", 0))
        if values.get("lost") or xid == GONE:
            yield Finding("gpu-lost", f"{gpu} is lost" + (f" (Xid {xid})" if xid else ""), gpu)
        elif xid:
            yield Finding("gpu-xid" if xid in FATAL else "gpu-error", f"{gpu} reports Xid {xid}", gpu)
        errors = values.get("ecc_uncorrectable")
        if errors is not None:
            if (more := errors - self._ecc.get(index, errors)) > 0:
                words = f"{gpu} has {more:.0f} uncorrectable memory errors more"
                yield Finding("gpu-ecc", words, gpu)
            self._ecc[index] = errors
        reasons, degrees = int(values.get("throttled", 0)), values.get("temperature", 0.0)
        hot = bool(reasons & HEATED) or degrees >= values.get("slowdown_temperature", 1e9) - NEAR
        if self._streaks.count(f"{index} hot", hot) >= IN_A_ROW:
            yield Finding("gpu-hot", f"{gpu} has {degrees:.0f} degrees", gpu)
        elif self._streaks.count(f"{index} slowed", bool(reasons & SLOWED)) >= IN_A_ROW:
            yield Finding("gpu-throttled", f"the hardware lowers the clocks of {gpu} (reasons {reasons:#x})", gpu)
        free, total = values.get("memory_free_bytes"), values.get("memory_total_bytes")
        if free is not None and total:
            trend = self._free.setdefault(index, Trend(SPAN_S))
            trend.add(at, free)
            if free < SCARCE * total and trend.fallen > SCARCE * total:
                yield Finding("gpu-memory", f"{gpu} has {size(int(free))} of {size(int(total))} left", gpu)


def _visible(text: str | None, number: int) -> list[int | str]:
    """Returns the indexes or identifiers of the devices that the training may use: those of other jobs on this machine
    are none of its business."""
    if text is None:
        return list(range(number))
    found = [one.strip() for one in text.split(",") if one.strip()]
    return [
        int(one) if one.isdecimal() else one for one in found if one.isdecimal() or one.startswith(("GPU-", "MIG-"))
    ]
