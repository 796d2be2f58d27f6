"""The accelerator's side of copying, with the driver replaced: what is asked of it, in which order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import numpy as np
import torch

from tenuto.integrations.torch import device
from tenuto.model.leaf import LeafSpec


def test_an_accelerators_copies_are_queued_awaited_and_their_memory_given_back() -> None:
    event, runtime = mock.MagicMock(), mock.MagicMock()
    runtime.cudaHostRegister.return_value = 0
    image = np.zeros(8192, np.uint8)
    specs = [LeafSpec("a", "complex64", (2,)), LeafSpec("b", "float32", (4,))]
    with (
        mock.patch.object(torch.cuda, "Event", return_value=event),
        mock.patch.object(torch.cuda, "device", lambda which: contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "cudart", return_value=runtime),
    ):
        bound = device.AcceleratorBound(specs, [image[4096:4112], image[4112:4128]], torch.device("cuda:0"))
        again = device.AcceleratorBound(specs, [image[4096:4112], image[4112:4128]], torch.device("cuda:1"))
        assert runtime.cudaHostRegister.call_count == 1, "memory that is pinned already is not pinned again"
        begin, length, _ = runtime.cudaHostRegister.call_args.args
        assert (begin, length) == (image.ctypes.data, image.nbytes), "the image is pinned as a whole"
        bound.copy([torch.tensor([1 + 2j, 3 - 1j]).conj(), torch.arange(4.0)], 0, 2)
        assert event.record.call_count == 1 and event.synchronize.call_count == 0
        bound.wait()
        assert event.synchronize.call_count == 1
        del bound, again
        runtime.cudaHostUnregister.assert_called_once_with(begin)
    assert image[4096:4112].view(np.complex64).tolist() == [1 - 2j, 3 + 1j]
    assert image[4112:4128].view(np.float32).tolist() == [0, 1, 2, 3]


class Runtime:
    """A driver's registrations of host memory. `refuses`: the error that it answers one with, which stays until a
    kernel is launched."""

    def __init__(self, refuses: int = 0) -> None:
        self.refuses, self.error, self.registered, self.log = refuses, 0, dict[int, int](), list[str]()

    def cudaHostRegister(self, begin: int, length: int, flags: int) -> int:
        self.log.append("register")
        if self.refuses:
            self.error = self.refuses
            return self.refuses
        assert begin not in self.registered, "a second registration is an error, reported at an unrelated call"
        self.registered[begin] = length
        return 0

    def cudaHostUnregister(self, begin: int) -> int:
        self.log.append("unregister")
        del self.registered[begin]
        return 0

    def launch(self, *arguments: object, **options: object) -> None:
        """As torch launches a kernel, which raises the error of an earlier call."""
        self.log.append("launch")
        error, self.error = self.error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")


@contextlib.contextmanager
def driven(runtime: Runtime) -> Iterator[None]:
    with (
        mock.patch.object(torch.cuda, "cudart", return_value=runtime),
        mock.patch.object(torch, "zeros", runtime.launch),
        mock.patch.dict(device._pinned, clear=True),
    ):
        yield


SPEC = [LeafSpec("a", "float32", (4,))]


def test_a_refused_registration_leaves_no_error_for_training_and_nothing_to_unregister() -> None:
    runtime, image = Runtime(refuses=2), np.zeros(4096, np.uint8)
    with driven(runtime):
        bound = device.AcceleratorBound(SPEC, [image[:16]], torch.device("cuda:0"))
        assert runtime.log == ["register", "launch"] and runtime.error == 0
        del bound
        assert runtime.log == ["register", "launch"] and not device._pinned


def test_only_an_image_that_stays_is_pinned() -> None:
    runtime, image = Runtime(), np.zeros(4096, np.uint8)
    with driven(runtime):
        copier = device.TorchDevice(torch.device("cuda:0"))
        passing = copier.bind(SPEC, [image[:16]], stays=False)
        assert runtime.log == [] and passing.on_device
        staying = copier.bind(SPEC, [image[:16]])
        assert runtime.registered == {image.ctypes.data: 4096}
        del passing
        assert runtime.log == ["register"], "what was not pinned gives nothing back"
        del staying
        assert runtime.log == ["register", "unregister"]


def test_an_image_stays_pinned_while_a_newer_plan_copies_into_it() -> None:
    runtime, image = Runtime(), np.zeros(4096, np.uint8)
    with driven(runtime):
        older = device.AcceleratorBound(SPEC, [image[:16]], torch.device("cuda:0"))
        newer = device.AcceleratorBound(SPEC, [image[2048:2064]], torch.device("cuda:0"))
        del older
        assert runtime.registered == {image.ctypes.data: 4096}
        del newer
        assert runtime.log == ["register", "unregister"] and not device._pinned
