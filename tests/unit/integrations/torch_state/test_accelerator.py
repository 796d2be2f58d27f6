"""The accelerator's side of copying, with the driver replaced: what is asked of it, in which order."""

from __future__ import annotations

import contextlib
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
