"""The accelerator's side of a fenced capture, with the driver replaced: what is asked of it, on which stream, in which
order. It says nothing about a real device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tenuto.integrations.torch import device
from tenuto.integrations.torch.device import TorchBound
from tenuto.model.leaf import LeafSpec

DEVICE = torch.device("cuda:0")


class Driver:
    """Writes down what streams and events are asked, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.stack = ["current"]
        self.events = 0

    def event(self) -> Event:
        self.events += 1
        return Event(self, self.events)


class Event:
    def __init__(self, driver: Driver, number: int) -> None:
        self.driver, self.number = driver, number

    def record(self, stream: Stream) -> None:
        self.driver.log.append(("record", self.number, stream.name))

    def synchronize(self) -> None:
        self.driver.log.append(("host waits", self.number))


class Stream:
    def __init__(self, driver: Driver, name: str) -> None:
        self.driver, self.name = driver, name

    def wait_event(self, event: Event) -> None:
        self.driver.log.append(("waits", self.name, event.number))


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    streams = {name: Stream(driver, name) for name in ("current", "side")}

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        driver.stack.append(stream.name)
        yield
        driver.stack.pop()

    copy = torch.Tensor.copy_

    def copied(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        driver.log.append(("copy", driver.stack[-1], non_blocking))
        return copy(self, source)

    with (
        mock.patch.object(torch.cuda, "Event", driver.event),
        mock.patch.object(torch.cuda, "Stream", lambda device: streams["side"]),
        mock.patch.object(torch.cuda, "current_stream", lambda device: streams[driver.stack[-1]]),
        mock.patch.object(torch.cuda, "stream", on),
        mock.patch.object(torch.cuda, "device", lambda device: contextlib.nullcontext()),
        mock.patch.object(torch.Tensor, "record_stream", lambda self, stream: driver.log.append(("held", stream.name))),
        mock.patch.object(torch.Tensor, "copy_", copied),
        mock.patch.object(torch.Tensor, "to", lambda self, device, non_blocking: self),
        mock.patch.dict(device._streams, clear=True),
    ):
        yield driver


def scene() -> tuple[list[np.ndarray[Any, Any]], torch.Tensor]:
    return [np.zeros(64, np.uint8)], torch.arange(16, dtype=torch.float32)


def copies_of(views: list[np.ndarray[Any, Any]], late: Any, watched: Any = ()) -> device.DeviceCopies:
    targets = [torch.from_numpy(view).view(torch.float32) for view in views]
    return device.DeviceCopies(DEVICE, views, late, watched, targets=targets)


def test_copies_wait_for_the_work_before_them_on_a_stream_of_their_own(driver: Driver) -> None:
    views, held = scene()
    with mock.patch.object(device, "DEVICE_STEP", 32):
        copies = copies_of(views, [(held, 0, 0, 32), (held, 0, 32, 64)])
    assert driver.log == [
        ("record", 1, "current"),
        ("waits", "side", 1),
        ("held", "side"),
        ("copy", "side", True),
        ("record", 2, "side"),
        ("held", "side"),
        ("copy", "side", True),
        ("record", 3, "side"),
        ("record", 4, "side"),
    ]
    assert views[0].view(np.float32).tolist() == held.tolist()
    driver.log.clear()
    copies.copy(1)
    assert driver.log == [("host waits", 3)], "the thread that follows the copies waits for one part"


def test_short_parts_are_awaited_together(driver: Driver) -> None:
    views, held = [np.zeros(64, np.uint8), np.zeros(64, np.uint8)], scene()[1]
    other = held + 1
    copies = copies_of(views, [(held, 0, 0, 32), (held, 0, 32, 64), (other, 1, 0, 64)])
    assert [entry for entry in driver.log if entry[0] == "record"] == [
        ("record", 1, "current"), ("record", 2, "side"), ("record", 3, "side"),
    ]  # fmt: skip
    assert [view.view(np.float32).tolist() for view in views] == [held.tolist(), other.tolist()]
    driver.log.clear()
    for number in range(3):
        copies.copy(number)
    assert driver.log == [("host waits", 2)] * 3


def test_an_update_is_ordered_behind_the_copies_and_the_host_does_not_wait(driver: Driver) -> None:
    views, held = scene()
    copies = copies_of(views, [(held, 0, 0, 64)])
    driver.log.clear()
    assert copies.order() is True
    assert driver.log == [("waits", "current", 3)]


def test_watched_parts_are_compared_behind_the_copies_and_before_the_update(driver: Driver) -> None:
    views, held = scene()
    views[0][:32] = held.numpy().view(np.uint8)[:32]
    views[0][8] ^= 1
    copies = copies_of(views, [(held, 0, 32, 64)], [(held, 0, 0, 16), (held, 0, 16, 32)])
    last = max(entry[1] for entry in driver.log if entry[0] == "record")
    assert list(copies.unchanged()) == [False, True]
    driver.log.clear()
    copies.order()
    assert driver.log == [("waits", "current", last)], "the comparison reads what the update writes"


def test_a_comparison_is_asked_for_at_once_and_answered_later(driver: Driver) -> None:
    views, held = scene()
    views[0][:] = held.numpy().view(np.uint8)
    verdict = device.compare_on_device(DEVICE, views, [(held, 0, 0, 64)])
    assert not any(entry[0] == "host waits" for entry in driver.log)
    assert list(verdict()) == [True]
    assert any(entry[0] == "host waits" for entry in driver.log)


# -- the host's side, for real -----------------------------------------------------------------------------------------


def test_the_host_compares_bits_and_not_numbers() -> None:
    tensor = torch.tensor([float("nan"), 0.0, 1.0])
    image = tensor.numpy().view(np.uint8).copy()
    assert device.compare_on_host([image], [(tensor, 0, 0, 12)])() == [True]
    tensor[1] = -0.0
    assert device.compare_on_host([image], [(tensor, 0, 0, 4), (tensor, 0, 4, 8), (tensor, 0, 8, 12)])() == [
        True,
        False,
        True,
    ]


def test_a_held_tensor_keeps_its_memory_and_its_count() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    bound = TorchBound([LeafSpec("a", "float32", (4,))], [np.zeros(16, np.uint8)])
    held = bound.hold(parameter)
    before = bound.version(held)
    with torch.no_grad():
        parameter.mul_(2)
    assert bound.version(held) > before and held.tolist() == [2.0] * 4
    parameter.data = torch.zeros(4)
    assert held.tolist() == [2.0] * 4 and held.data_ptr() != parameter.data_ptr()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(4, 4).t()[1:],
        torch.ones(2, dtype=torch.complex64).conj(),
        torch._neg_view(torch.ones(2)),
        torch.empty(0),
    ],
    ids=["strides", "conjugate", "negative", "empty"],
)
def test_what_cannot_be_copied_in_parts_does_not_wait(tensor: torch.Tensor) -> None:
    assert not device.can_wait(tensor) and device.can_wait(torch.ones(2))


def test_a_tensor_whose_changes_are_not_counted_does_not_wait() -> None:
    with torch.inference_mode():
        tensor = torch.ones(4)
    assert not device.can_wait(tensor)


# -- what is read twice, and what stays when the driver refuses --------------------------------------------------------


def test_parts_of_all_late_leaves_are_read_twice_by_the_device_and_compared_on_the_host(driver: Driver) -> None:
    held, still = torch.arange(16, dtype=torch.float32), torch.zeros(4)
    bound = unpinned([held, still])
    probe = bound.probe([(held, 0, 0, 8), (held, 0, 32, 48), (still, 1, 0, 16)])
    assert driver.log == [], "the first reading is queued behind training's work; nobody waits"
    held[9] = -1.0  # through `.data`, say: no counter has seen it
    copies = bound.late([(held, 0, 0, 64), (still, 1, 0, 16)], probe=probe)
    last = max(entry[1] for entry in driver.log if entry[0] == "record")
    behind = [entry[0] for entry in driver.log if entry[:1] == ("copy",) or entry[0] == "record"]
    assert behind[-2:] == ["record", "record"], (
        "the second reading is behind the copies, and before what orders updates"
    )
    assert not any(entry[0] == "host waits" for entry in driver.log)
    assert copies.order()
    assert driver.log[-1] == ("waits", "current", last)
    driver.log.clear()
    assert [probe(number) for number in range(3)] == [True, False, True]
    assert [entry[0] for entry in driver.log] == ["host waits"], "one answer for all parts"


def test_where_nothing_was_copied_late_a_probe_finds_nothing_torn(driver: Driver) -> None:
    held = torch.ones(4)
    probe = unpinned([held]).probe([(held, 0, 0, 16)])
    held.zero_()
    assert probe(0) is True


def unpinned(tensors: list[torch.Tensor]) -> device.AcceleratorBound:
    specs = [LeafSpec(str(number), "float32", tuple(one.shape)) for number, one in enumerate(tensors)]
    views = [np.zeros(one.numel() * 4, np.uint8) for one in tensors]
    return device.AcceleratorBound(specs, views, DEVICE, stays=False)
