"""A part of a tensor is copied beside training without holding the interpreter."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import torch

from support.interpreter_lock import lets_others_run
from tenuto.integrations.torch.device import AcceleratorBound, TorchBound, TorchDevice
from tenuto.model.leaf import LeafSpec

LARGE = 128 << 20


def test_copying_a_part_lets_other_threads_run() -> None:
    source, image = torch.ones(LARGE, dtype=torch.uint8), np.zeros(LARGE, np.uint8)
    bound = TorchBound([LeafSpec("leaf", "uint8", (LARGE,))], [image])
    assert lets_others_run(lambda: bound.copy_part(source, 0, 0, LARGE))
    assert image.all()


class Elsewhere:
    """What is asked of a dense tensor on a device whose memory is not this process's."""

    device = torch.device("mps")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


def test_no_part_is_copied_of_what_is_on_another_device_than_the_host() -> None:
    tensor = torch.ones(4)
    bound = TorchDevice(torch.device("mps")).bind([LeafSpec("leaf", "float32", (4,))], [np.zeros(16, np.uint8)])
    assert isinstance(bound, TorchBound)
    assert bound.splits(tensor) and bound.can_wait(tensor)
    assert not bound.splits(Elsewhere(tensor)), "it has no array to be copied from"
    assert not bound.can_wait(Elsewhere(tensor)), "its address is not one of this process's memory"


def test_an_accelerators_own_copies_may_wait() -> None:
    assert AcceleratorBound.can_wait(mock.Mock(spec=AcceleratorBound), Elsewhere(torch.ones(4)))
