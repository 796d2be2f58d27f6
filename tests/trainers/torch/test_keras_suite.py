"""`fit` of Keras on torch, killed, resumed from steps, asked to leave, and certified."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from tenuto.testing.trainer_suite import TrainerSuite


class TestFit(TrainerSuite):
    script = Path(__file__).parents[1] / "scripts" / "keras_fit.py"
    deadline_s = 600.0
    environment: ClassVar = {"KERAS_BACKEND": "torch"}
    preload: ClassVar = ("keras", "tenuto.keras")
