"""Trainings with JAX, killed and resumed, come to what an uninterrupted one comes to, bit for bit."""

from __future__ import annotations

import os
from pathlib import Path
from types import MappingProxyType

import pytest

from tenuto.testing.trainer_suite import TrainerSuite

ON_CPU = os.environ.get("TRAINERS_DEVICE", "cpu") == "cpu"
ONE_DEVICE = MappingProxyType({"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""} if ON_CPU else {})
SCRIPT = Path(__file__).with_name("train_jax.py")


class TestOptax(TrainerSuite):
    """A jitted step that donates its state, gradients accumulated by Optax, keys, and an iterator of its own."""

    script = SCRIPT
    options = ("--kind", "optax")
    every = 6
    environment = ONE_DEVICE


@pytest.mark.long
class TestNnx(TrainerSuite):
    """Flax's NNX: dropout, batch norm, optimizer and metrics as objects that are filled in place."""

    script = SCRIPT
    options = ("--kind", "nnx")
    every = 6
    certify_steps = (9,)
    environment = ONE_DEVICE
