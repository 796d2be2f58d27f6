"""Several steps to one execution: on_train_batch_end comes once for them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from keras_sweep import differences


def test_resumed_inside_an_epoch_and_at_its_end(tmp_path):
    assert not differences(tmp_path, [2, 8, 14], "--steps-at-once", "2", "--epochs", "2")


def test_workers_of_a_dataset(tmp_path):
    assert not differences(tmp_path, [3, 8, 13], "--source", "workers", "--epochs", "2")
