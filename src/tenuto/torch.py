"""`tenuto.torch`: what Tenuto offers to torch's users."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tenuto.integrations.torch import ResumableSampler, resumable
from tenuto.integrations.torch.gradients import Gradients

if TYPE_CHECKING:
    from tenuto.integrations.torch.distributed_checkpoint import StorageReader, StorageWriter
    from tenuto.integrations.torch.save_file import load, save

__all__ = ["Gradients", "ResumableSampler", "StorageReader", "StorageWriter", "load", "resumable", "save"]

_HOMES = {
    "StorageReader": "distributed_checkpoint",
    "StorageWriter": "distributed_checkpoint",
    "load": "save_file",
    "save": "save_file",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Imports what needs `torch.distributed.checkpoint` only where it is used."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = globals()[name] = getattr(import_module(f"tenuto.integrations.torch.{_HOMES[name]}"), name)
        return value
