"""GPUs, by a module that stands for NVML's."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from support.traces import judged, named, trace
from tenuto.supervisor.detectors import gpu
from tenuto.supervisor.detectors.gpu import Gpu, _visible

GIB = 1 << 30


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


class FakeNvml(SimpleNamespace):
    """The functions of pynvml that are called, over two devices. `events`: what comes, as (device, Xid)."""

    NVMLError = NVMLError
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_TEMPERATURE_GPU = NVML_VOLATILE_ECC = 0
    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    nvmlEventTypeXidCriticalError = 8

    def __init__(self) -> None:
        super().__init__(lost=set(), events=[], unsupported=set(), has_events=True, has_driver=True)

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise NVMLError(12)

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"handle {index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return f"handle {uuid[-1]}"

    def nvmlDeviceGetHandleByPciBusId(self, bus: str) -> str:
        return {"0000:3b:00.0": "handle 0", "0000:af:00.0": "handle 1"}[bus]

    def nvmlDeviceGetIndex(self, handle: str) -> int:
        return int(handle[-1])

    def _read(self, name: str, handle: str, value: Any) -> Any:
        if self.nvmlDeviceGetIndex(handle) in self.lost:
            raise NVMLError(self.NVML_ERROR_GPU_IS_LOST)
        if name in self.unsupported:
            raise NVMLError(3)
        return value

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return int(self._read("temperature", handle, 61))

    def nvmlDeviceGetTemperatureThreshold(self, handle: str, threshold: int) -> int:
        return int(self._read("threshold", handle, 95))

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return int(self._read("throttled", handle, 4))

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, counter: int) -> int:
        return int(self._read("ecc", handle, 0))

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return self._read("memory", handle, SimpleNamespace(free=30 * GIB, total=80 * GIB))

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return self._read("utilization", handle, SimpleNamespace(gpu=97))

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return int(self._read("power", handle, 650_000))

    def nvmlEventSetCreate(self) -> str:
        if not self.has_events:
            raise NVMLError(3)
        return "set"

    def nvmlDeviceRegisterEvents(self, handle: str, kinds: int, events: str) -> None:
        assert (kinds, events) == (8, "set")

    def nvmlEventSetWait_v2(self, events: str, timeout: int) -> Any:
        assert timeout == 0
        if not self.events:
            raise NVMLError(10)
        index, number = self.events.pop(0)
        return SimpleNamespace(device=f"handle {index}", eventData=number)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    found = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", found)  # type: ignore[arg-type]
    monkeypatch.delenv(gpu.VISIBLE, raising=False)
    return found


def test_all_that_a_device_says_is_sampled_and_what_it_does_not_say_is_left_out(nvml: FakeNvml) -> None:
    nvml.unsupported = {"ecc"}
    values = Gpu().sample()
    assert values is not None
    assert {name: value for name, value in values.items() if name.startswith("1.")} == {
        "1.temperature": 61, "1.slowdown_temperature": 95, "1.throttled": 4, "1.memory_free_bytes": 30 * GIB,
        "1.memory_total_bytes": 80 * GIB, "1.utilization": 97, "1.power_w": 650,
    }  # fmt: skip


def test_a_lost_device_and_xid_errors_are_sampled_the_fatal_ones_first(nvml: FakeNvml) -> None:
    detector = Gpu()
    detector.sample()
    nvml.lost, nvml.events = {0}, [(1, 31), (1, 94), (1, 13)]
    values = detector.sample()
    assert values is not None and (values["0.lost"], values["1.xid"]) == (1, 94) and "0.temperature" not in values
    assert "1.xid" not in (detector.sample() or {})


def test_where_nvml_has_no_events_the_kernels_log_is_read(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter([b"6,1,1,-;usb 1-1: new\n", b"4,2,2,-;NVRM: Xid (PCI:0000:af:00): 79, pid=1, GPU has fallen off\n"])

    def read(descriptor: int, size: int) -> bytes:
        assert descriptor == 99
        line = next(lines, None)
        if line is None:
            raise BlockingIOError
        return line

    nvml.has_events = False
    monkeypatch.setattr(gpu.os, "open", lambda path, flags: 99)
    monkeypatch.setattr(gpu.os, "lseek", lambda *_: 0)
    monkeypatch.setattr(gpu.os, "read", read)
    assert (Gpu().sample() or {})["1.xid"] == 79


def test_without_the_extra_a_driver_or_a_visible_device_nothing_is_sampled(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(gpu.VISIBLE, "")
    assert Gpu().sample() is None
    nvml.has_driver = False
    monkeypatch.delenv(gpu.VISIBLE)
    assert Gpu().sample() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Gpu().sample() is None


def test_devices_of_other_jobs_are_left_alone(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _visible(None, 2) == [0, 1] and _visible("1, GPU-0", 2) == [1, "GPU-0"] and _visible("NoDevFiles", 2) == []
    monkeypatch.setenv(gpu.VISIBLE, "1")
    values = Gpu().sample()
    assert values is not None and {name[0] for name in values} == {"1"}


def found_of(*readings: dict[str, float]) -> list[str]:
    steps = itertools.chain(readings)
    return named(Gpu(), trace("gpu", lambda at: next(steps), period_s=10, lasts_s=10 * len(readings)))


def test_what_ends_a_device_is_told_from_what_the_application_did() -> None:
    assert found_of({"0.lost": 1}) == ["gpu-lost"] and found_of({"0.xid": 79}) == ["gpu-lost"]
    assert found_of({"0.xid": 94}) == ["gpu-xid"] and found_of({"0.xid": 13}) == ["gpu-error"]


def test_memory_errors_count_where_they_become_more() -> None:
    assert found_of({"0.ecc_uncorrectable": 7}, {"0.ecc_uncorrectable": 7}) == []
    assert found_of({"0.ecc_uncorrectable": 7}, {"0.ecc_uncorrectable": 9}) == ["gpu-ecc"]


def test_heat_and_lowered_clocks_count_where_they_last_and_the_power_cap_does_not() -> None:
    usual = {"0.temperature": 70.0, "0.slowdown_temperature": 95.0, "0.throttled": 4.0}
    assert found_of(*[usual] * 9) == [] and found_of(*[{**usual, "0.throttled": 64.0}, usual] * 5) == []
    assert found_of(*[{**usual, "0.throttled": 64.0}] * 3) == ["gpu-hot"]
    assert found_of(*[{**usual, "0.temperature": 93.0}] * 3) == ["gpu-hot"]
    assert found_of(*[{**usual, "0.throttled": 128.0}] * 3) == ["gpu-throttled"]


def test_device_memory_that_has_just_run_out_is_noted_and_memory_that_is_taken_for_good_is_not() -> None:
    def memory(at: float) -> dict[str, float]:
        return {"0.memory_free_bytes": max(10 - at / 10, 1) * GIB, "0.memory_total_bytes": 80.0 * GIB}

    found = judged(Gpu(), trace("gpu", memory, period_s=10, lasts_s=600))
    assert found[0][0] == 90 and found[-1][0] < 160
