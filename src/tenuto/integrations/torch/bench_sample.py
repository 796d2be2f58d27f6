"""The sample state of `tenuto bench` as torch tensors over the same memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tenuto.bench.measure import Arrays, Sample, make_arrays


def torch_sample(sizes: Sequence[int]) -> Sample:
    """Returns tensors of these lengths in bytes, copied by torch with its default threads."""
    arrays = make_arrays(sizes)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}

    def copy(into: Arrays) -> None:
        for name, tensor in tensors.items():
            torch.from_numpy(into[name]).copy_(tensor)

    words = f"torch {torch.__version__} tensors, {torch.get_num_threads()} threads"
    return Sample(arrays, {"state": tensors}, copy, words)
