"""Every later version decodes chunks that are rounded from others as the first one stored them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

import tenuto
from tenuto.model.ids import CheckpointId
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

WHERE = Path(__file__).parent / "rounded"


def test_what_was_stored_is_decoded() -> None:
    words = np.arange(2500, dtype=np.uint32) * np.uint32(1717986)
    words[:8] = [0x80000000, 1, 0x80000001, 0x7F800001, 0xFFFFFFFF, 0x7F800000, 0x007FFFFF, 0x38800000]
    found = tenuto.load(WHERE, step=1).state
    assert found["master"].view(torch.int32).numpy().tobytes() == words.tobytes()
    number = ~found["master"].isnan()
    for name, dtype, master in (("bfloat16", torch.bfloat16, "master"), ("float16", torch.float16, "whole")):
        bits, expected = found[name].view(torch.int16), found[master].to(dtype).view(torch.int16)
        assert torch.equal(bits[number], expected[number]), name
    assert found["bfloat16"][~number].isnan().all() and not found["whole"].isnan().any()


def test_it_is_what_it_is_for() -> None:
    repo = Repo.open(open_store(WHERE))
    manifest = repo.manifest(CheckpointId("main", 1, 1))
    assert json.loads((WHERE / manifest.id.manifest).read_bytes())["format"] == 4
    stored = repo.index(manifest).stored
    assert stored is not None and stored.rounded is not None
    assert sorted(set(stored.rounded.tolist())) == [0, 1, 2]
