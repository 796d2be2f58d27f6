"""torch: tensors, modules and optimizers as leaves, exact data positions, generators. Loaded when torch is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenuto.integrations.torch.data.resumable import resumable as resumable
    from tenuto.integrations.torch.data.sampler import ResumableSampler as ResumableSampler


_HOMES = {"ResumableSampler": "data.sampler", "resumable": "data.resumable"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
