"""Writes the golden checkpoint with chunks that are rounded from others, and what it holds. Run once:

    python tests/golden/make_rounded.py

What a release has written is never written again. It refuses to run where it exists.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tenuto
from tenuto.concurrency import process
from tenuto.model.records import Owner
from tenuto.repo import tombstones
from tenuto.repo.ownership import claim
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

HERE = Path(__file__).parent / "rounded"
CHUNK = 4096


def state() -> dict[str, Any]:
    """Masters of two and a half chunks, with what is no number and what is hardly one, and their copies."""
    words = np.arange(2500, dtype=np.uint32) * np.uint32(1717986)
    words[:8] = [0x80000000, 1, 0x80000001, 0x7F800001, 0xFFFFFFFF, 0x7F800000, 0x007FFFFF, 0x38800000]
    master = torch.from_numpy(words.view(np.float32))
    whole = torch.where(master.isnan(), torch.zeros(()), master)
    return {
        "bfloat16": master.bfloat16(),
        "float16": whole.to(torch.float16),
        "master": master,
        "whole": whole,
    }


def main() -> None:
    if HERE.exists():
        sys.exit(f"{HERE} exists: a golden file is never written again")
    for module in (claim, process, tombstones):
        module.this_process = lambda: Owner("golden", "boot", "pid:[1]", 1234, "5678", "nobody")  # type: ignore[attr-defined]
    Repo.create_or_open(open_store(HERE), chunk_bytes=CHUNK)
    tenuto.save(state(), HERE, step=1, encoding=tenuto.Encoding())


if __name__ == "__main__":
    main()
