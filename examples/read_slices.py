"""Looks into a checkpoint without restoring it: only what is asked for is read, and verified.

python read_slices.py checkpoints
"""

import sys

import torch

import tenuto


def look(where: str) -> torch.Tensor:
    torch.manual_seed(0)
    tenuto.save({"embedding": torch.randn(10_000, 64), "vocabulary": 10_000}, where, run="words")

    with tenuto.open(where, run="words") as opened:
        for path, leaf in opened.items():
            print(f"{path}: {leaf.dtype} {leaf.shape}, {leaf.nbytes} bytes")
        rows: torch.Tensor = opened["embedding"][100:104, ::2]
        print(f"{tuple(rows.shape)}; {opened.bytes_read} of {opened.bytes} bytes were read")
        assert opened.plain("vocabulary") == 10_000
    return rows


if __name__ == "__main__":
    look(*sys.argv[1:2] or ["checkpoints"])
