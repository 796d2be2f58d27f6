"""What the arguments of a Trainer say about saving, as policies."""

from __future__ import annotations

from typing import Any, Final

from tenuto.integrations.transformers.progress import BEST
from tenuto.policy import every, keep, on
from tenuto.policy.keep import KeepPolicy
from tenuto.policy.save import Moment, SaveHistory, SavePolicy

NO: Final = "no"
KEPT: Final = 3
"""Checkpoints that are kept where nothing says how many, as of a Checkpointer."""


class TrainerAsks(SavePolicy):
    """Saves where the Trainer would: by `save_strategy`, where a callback sets `control.should_save`, and, with
    `load_best_model_at_end`, each new best model. All ranks ask at the same steps."""

    def __init__(self) -> None:
        self.step = -1
        """The step at which the Trainer has asked."""

    @property
    def alike(self) -> bool:
        return True

    def wants(self, now: Moment, history: SaveHistory) -> str | None:
        return "the Trainer saves here" if now.step == self.step else None

    def __repr__(self) -> str:
        return "save_strategy"


def saving(args: Any, asked: TrainerAsks, save: SavePolicy | None) -> SavePolicy:
    """Returns when to save. What `save` says comes in addition to the Trainer's own strategy."""
    if save is not None:
        return asked | save
    if _described(args.save_strategy) == NO:
        return asked | every(minutes=10) | on.end() | on.signal()
    return asked | on.end() | on.signal()


def keeping(args: Any, kept: KeepPolicy | None) -> KeepPolicy:
    """Returns what to keep: `save_total_limit` checkpoints, and the best model's where one is looked for."""
    chosen = kept if kept is not None else keep.latest(args.save_total_limit or KEPT)
    return chosen | keep.best(1, BEST, "max") if args.metric_for_best_model is not None else chosen


def _described(strategy: Any) -> str:
    return str(getattr(strategy, "value", strategy))
