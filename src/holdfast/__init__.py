"""Holdfast keeps deep-learning training alive.

Importing this package loads no framework, and each name only when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast.version import __version__

if TYPE_CHECKING:
    from holdfast import errors as errors
    from holdfast import events as events
    from holdfast import report as report
    from holdfast.api.checkpointer import Checkpointer
    from holdfast.api.oneoff import load, save
    from holdfast.api.opened import Opened, open
    from holdfast.api.repository import Repository
    from holdfast.api.restored import Checkpoint, Restored
    from holdfast.api.stats import Stats
    from holdfast.engine.handle import Save
    from holdfast.errors import HoldfastError
    from holdfast.guard.preempted import Preempted
    from holdfast.integrations.torch.declarations import declare
    from holdfast.model.spread import RankTimings
    from holdfast.model.timing import Timing
    from holdfast.policy import every, keep, on
    from holdfast.ranks.shared_files import SharedFiles
    from holdfast.ranks.solo import Solo
    from holdfast.repo.spread import Mirror, PerNode
    from holdfast.state.declared import flat, fused, per_rank, replicated, shard
    from holdfast.state.tagged import Tagged

_HOME = {
    "Checkpoint": "holdfast.api.restored",
    "Checkpointer": "holdfast.api.checkpointer",
    "HoldfastError": "holdfast.errors",
    "Mirror": "holdfast.repo.spread",
    "Opened": "holdfast.api.opened",
    "PerNode": "holdfast.repo.spread",
    "Preempted": "holdfast.guard.preempted",
    "RankTimings": "holdfast.model.spread",
    "Repository": "holdfast.api.repository",
    "Restored": "holdfast.api.restored",
    "Save": "holdfast.engine.handle",
    "SharedFiles": "holdfast.ranks.shared_files",
    "Solo": "holdfast.ranks.solo",
    "Stats": "holdfast.api.stats",
    "Tagged": "holdfast.state.tagged",
    "Timing": "holdfast.model.timing",
    "declare": "holdfast.integrations.torch.declarations",
    "every": "holdfast.policy",
    "flat": "holdfast.state.declared",
    "fused": "holdfast.state.declared",
    "keep": "holdfast.policy",
    "load": "holdfast.api.oneoff",
    "on": "holdfast.policy",
    "open": "holdfast.api.opened",
    "per_rank": "holdfast.state.declared",
    "replicated": "holdfast.state.declared",
    "save": "holdfast.api.oneoff",
    "shard": "holdfast.state.declared",
}

_MODULES = ("errors", "events", "report")
"""Modules that are written as `holdfast.report.JsonLines(…)`, without an import of their own."""

__all__ = [
    "Checkpoint",
    "Checkpointer",
    "HoldfastError",
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
    "replicated",
    "save",
    "shard",
]


if not TYPE_CHECKING:  # a checker that saw it would take every misspelt name for something

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return import_module(f"holdfast.{name}")  # which puts it among the names of this module
        home = _HOME.get(name)
        if home is None:
            raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
        value = getattr(import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})
