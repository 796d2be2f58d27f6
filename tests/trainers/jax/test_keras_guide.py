"""A `fit` whose other callbacks never look at the model between two batches, as the guide has it; with torch installed
beside jax, and without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tenuto

ROOT = Path(__file__).parents[3]
FIT = """
import keras, numpy as np, tenuto, tenuto.keras
keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(32), keras.layers.Dropout(0.2), keras.layers.Dense(1)])
model.compile("adamw", "mse")
data = tenuto.keras.resumable(x, x.sum(1, keepdims=True), batch_size=32)
saving = {SAVING}
callback = tenuto.keras.TenutoCheckpoint({WHERE!r}, data=data, save_freq=5, monitor="loss", **saving)
model.fit(data, epochs=3, verbose=0, callbacks=[keras.callbacks.EarlyStopping("loss"), callback])
tenuto.load({WHERE!r}, into={{"weights": tenuto.keras.weights(model)}}, step="{BEST}")
"""


def fit(where: Path, before: str = "", saving: str = "{}") -> subprocess.CompletedProcess[str]:
    script = before + FIT.format(
        WHERE=str(where), SAVING=saving, BEST="best:loss" if saving == "{}" else "best:loss:min"
    )
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)


def test_the_first_save_inside_an_epoch(tmp_path: Path) -> None:
    done = fit(tmp_path / "ck")
    assert done.returncode == 0, done.stderr
    assert 24 in losses(tmp_path / "ck")


def test_with_torch_beside_jax(tmp_path: Path) -> None:
    """Of the environment of the trainers on torch, where this machine has it."""
    found = next((ROOT / "build" / "trainers" / "torch" / "lib").glob("python*/site-packages/torch"), None)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if found is None or found.parents[1].name != version:
        pytest.skip("no torch for this Python on this machine")
    done = fit(tmp_path / "ck", f"import sys; sys.path.append({str(found.parent)!r})\nimport torch\n")
    assert done.returncode == 0, done.stderr


def losses(where: Path) -> dict[int, float]:
    steps = [one.step for one in tenuto.Repository(where).checkpoints()]
    return {step: tenuto.open(where, step=step).metrics["loss"] for step in steps}


@pytest.mark.parametrize("top", [2, -1])
def test_the_best_are_kept_as_save_top_k_says(tmp_path: Path, top: int) -> None:
    for name, saving in (("all", "{'save_top_k': -1}"), ("some", f"{{'save_top_k': {top}}}")):
        done = fit(tmp_path / name, saving=saving)
        assert done.returncode == 0, done.stderr
    whole, kept = losses(tmp_path / "all"), losses(tmp_path / "some")
    best = sorted(whole, key=lambda step: whole[step])
    assert set(whole) == {5, 8, 10, 15, 16, 20, 24} and set(kept) == {*(best if top == -1 else best[:top]), 24}


def test_max_to_keep_beside_monitor_is_refused_by_what_was_given(tmp_path: Path) -> None:
    done = fit(tmp_path / "ck", saving='{"max_to_keep": 2}')
    assert done.returncode != 0 and "max_to_keep counts the newest, and does not mix" in done.stderr
