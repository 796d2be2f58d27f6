"""A part of a tensor is copied beside training without holding the interpreter."""

from __future__ import annotations

import numpy as np
import torch

from holdfast.integrations.torch.device import TorchBound
from holdfast.model.leaf import LeafSpec
from interpreter_lock import lets_others_run

LARGE = 128 << 20


def test_copying_a_part_lets_other_threads_run() -> None:
    source, image = torch.ones(LARGE, dtype=torch.uint8), np.zeros(LARGE, np.uint8)
    bound = TorchBound([LeafSpec("leaf", "uint8", (LARGE,))], [image])
    assert lets_others_run(lambda: bound.copy_part(source, 0, 0, LARGE))
    assert image.all()
