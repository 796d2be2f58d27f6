"""Tenuto keeps deep-learning training alive.

Importing this package loads no framework, and each name only when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tenuto.version import __version__

if TYPE_CHECKING:
    from tenuto import errors as errors
    from tenuto import events as events
    from tenuto import telemetry as telemetry
    from tenuto.api.open import Opened, open
    from tenuto.api.repository import Repository
    from tenuto.api.save_load import load, save
    from tenuto.engine.read.choose import Checkpoint, Restored
    from tenuto.engine.save.handle import Save
    from tenuto.errors import TenutoError, TenutoWarning
    from tenuto.integrations.torch.adapter import declare
    from tenuto.model.timing import RankTimings, Timing
    from tenuto.policy import every, keep, on
    from tenuto.ranks.detection import Solo
    from tenuto.ranks.kv.shared_files import SharedFiles
    from tenuto.repo.replicated.places import Mirror, PerNode
    from tenuto.state.declarations import flat, fused, per_rank, replicated, shard
    from tenuto.state.frameworks import Tagged, register
    from tenuto.training.checkpointer import Checkpointer
    from tenuto.training.preemption import Preempted
    from tenuto.training.stats import Stats


_HOME = {
    "Checkpoint": "tenuto.engine.read.choose",
    "Checkpointer": "tenuto.training.checkpointer",
    "TenutoError": "tenuto.errors",
    "TenutoWarning": "tenuto.errors",
    "Mirror": "tenuto.repo.replicated.places",
    "Opened": "tenuto.api.open",
    "PerNode": "tenuto.repo.replicated.places",
    "Preempted": "tenuto.training.preemption",
    "RankTimings": "tenuto.model.timing",
    "Repository": "tenuto.api.repository",
    "Restored": "tenuto.engine.read.choose",
    "Save": "tenuto.engine.save.handle",
    "SharedFiles": "tenuto.ranks.kv.shared_files",
    "Solo": "tenuto.ranks.detection",
    "Stats": "tenuto.training.stats",
    "Tagged": "tenuto.state.frameworks",
    "Timing": "tenuto.model.timing",
    "declare": "tenuto.integrations.torch.adapter",
    "every": "tenuto.policy",
    "flat": "tenuto.state.declarations",
    "fused": "tenuto.state.declarations",
    "keep": "tenuto.policy",
    "load": "tenuto.api.save_load",
    "on": "tenuto.policy",
    "open": "tenuto.api.open",
    "per_rank": "tenuto.state.declarations",
    "register": "tenuto.state.frameworks",
    "replicated": "tenuto.state.declarations",
    "save": "tenuto.api.save_load",
    "shard": "tenuto.state.declarations",
}

_MODULES = ("errors", "events", "telemetry")
"""Modules that are written as `tenuto.telemetry.JsonLines(…)`, without an import of their own."""

__all__ = [
    "Checkpoint",
    "Checkpointer",
    "Mirror",
    "Opened",
    "PerNode",
    "Preempted",
    "RankTimings",
    "Repository",
    "Restored",
    "Save",
    "SharedFiles",
    "Solo",
    "Stats",
    "Tagged",
    "TenutoError",
    "TenutoWarning",
    "Timing",
    "__version__",
    "declare",
    "every",
    "flat",
    "fused",
    "keep",
    "load",
    "on",
    "open",
    "per_rank",
    "register",
    "replicated",
    "save",
    "shard",
]


if not TYPE_CHECKING:  # a checker that saw it would take every misspelt name for something

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return import_module(f"tenuto.{name}")  # which puts it among the names of this module
        home = _HOME.get(name)
        if home is None:
            raise AttributeError(f"module 'tenuto' has no attribute {name!r}")
        value = getattr(import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})
