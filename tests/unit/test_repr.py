"""What people print to see what they have is one line, whatever it holds."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import tenuto


@pytest.mark.filterwarnings("ignore")
def test_what_was_saved_and_loaded_prints_as_one_line(tmp_path: Path) -> None:
    place = tmp_path / "ckpts"
    state = {f"w{number}": np.zeros((50, 50)) for number in range(40)}
    saved = tenuto.save(state, place)
    tenuto.save(state, place)
    assert str(saved) == f"<main/a0001/0 at {place}: 40 tensors, 785 KiB>"
    restored = tenuto.load(place)
    line = rf"<main/a0001/1 restored from {place}: 40 tensors, 785 KiB in [0-9.]+ m?s"
    assert re.fullmatch(rf"{line}>", str(restored))
    (place / "runs/main/a0001/step-00000001/manifest.json").write_bytes(b"?")
    restored = tenuto.load(place)
    assert re.fullmatch(rf"{line.replace('/1 ', '/0 ')}, 1 damaged checkpoint passed over>", repr(restored))
    state = {"w": np.zeros(3)}
    with tenuto.Checkpointer(place, state, run="trained", log="silent") as ckpt:
        for _ in ckpt.steps(1):
            state["w"] += 1
    with tenuto.Checkpointer(place, state, run="trained", log="silent") as ckpt:
        restored_line = str(ckpt.restore())
    assert re.fullmatch(r"<trained/.*: \d tensors, .* in [0-9.]+ m?s; no known gap>", restored_line), restored_line
