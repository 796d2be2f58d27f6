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
    from tenuto import formats as formats
    from tenuto import telemetry as telemetry
    from tenuto.api.open import open
    from tenuto.api.repository import Repository
    from tenuto.api.save_load import load, save
    from tenuto.engine.read.choose import Checkpoint, Restored
    from tenuto.engine.read.opened import Opened
    from tenuto.engine.save.handle import Save
    from tenuto.errors import TenutoError, TenutoWarning
    from tenuto.integrations.torch.adapter import declare
    from tenuto.model.timing import RankTimings, Timing
    from tenuto.policy import every, keep, on
    from tenuto.policy.encoding import Encoding
    from tenuto.ranks.detection import Solo
    from tenuto.ranks.kv.shared_files import SharedFiles
    from tenuto.repo.replicated.places import Mirror, PerNode
    from tenuto.repo.replicated.tiers import Tier, Tiers
    from tenuto.state.declarations import first_rank, flat, fused, late, per_rank, replicated, shard
    from tenuto.state.frameworks import Tagged, register
    from tenuto.store.wrappers.cache import Cached
    from tenuto.store.wrappers.stripe import Stripe
    from tenuto.supervisor.restart import Restart, restart
    from tenuto.training.checkpointer import Checkpointer
    from tenuto.training.preemption import Preempted
    from tenuto.training.stats import Stats
    from tenuto.training.unhealthy import Unhealthy


_HOME = {
    "Cached": "tenuto.store.wrappers.cache",
    "Checkpoint": "tenuto.engine.read.choose",
    "Checkpointer": "tenuto.training.checkpointer",
    "TenutoError": "tenuto.errors",
    "TenutoWarning": "tenuto.errors",
    "Encoding": "tenuto.policy.encoding",
    "Mirror": "tenuto.repo.replicated.places",
    "Opened": "tenuto.engine.read.opened",
    "PerNode": "tenuto.repo.replicated.places",
    "Preempted": "tenuto.training.preemption",
    "RankTimings": "tenuto.model.timing",
    "Repository": "tenuto.api.repository",
    "Restart": "tenuto.supervisor.restart",
    "Restored": "tenuto.engine.read.choose",
    "Save": "tenuto.engine.save.handle",
    "SharedFiles": "tenuto.ranks.kv.shared_files",
    "Solo": "tenuto.ranks.detection",
    "Stats": "tenuto.training.stats",
    "Stripe": "tenuto.store.wrappers.stripe",
    "Tagged": "tenuto.state.frameworks",
    "Tier": "tenuto.repo.replicated.tiers",
    "Tiers": "tenuto.repo.replicated.tiers",
    "Timing": "tenuto.model.timing",
    "Unhealthy": "tenuto.training.unhealthy",
    "declare": "tenuto.integrations.torch.adapter",
    "every": "tenuto.policy",
    "first_rank": "tenuto.state.declarations",
    "flat": "tenuto.state.declarations",
    "fused": "tenuto.state.declarations",
    "keep": "tenuto.policy",
    "late": "tenuto.state.declarations",
    "load": "tenuto.api.save_load",
    "on": "tenuto.policy",
    "open": "tenuto.api.open",
    "per_rank": "tenuto.state.declarations",
    "register": "tenuto.state.frameworks",
    "replicated": "tenuto.state.declarations",
    "restart": "tenuto.supervisor.restart",
    "save": "tenuto.api.save_load",
    "shard": "tenuto.state.declarations",
}

_MODULES = ("errors", "events", "formats", "telemetry")
"""Modules that are written as `tenuto.telemetry.JsonLines(…)`, without an import of their own."""

__all__ = [
    "Cached",
    "Checkpoint",
    "Checkpointer",
    "Encoding",
    "Mirror",
    "Opened",
    "PerNode",
    "Preempted",
    "RankTimings",
    "Repository",
    "Restart",
    "Restored",
    "Save",
    "SharedFiles",
    "Solo",
    "Stats",
    "Stripe",
    "Tagged",
    "TenutoError",
    "TenutoWarning",
    "Tier",
    "Tiers",
    "Timing",
    "Unhealthy",
    "__version__",
    "declare",
    "every",
    "first_rank",
    "flat",
    "fused",
    "keep",
    "late",
    "load",
    "on",
    "open",
    "per_rank",
    "register",
    "replicated",
    "restart",
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
