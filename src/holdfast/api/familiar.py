"""Names that users of other libraries know, as policies.

`save_top_k`, `monitor`, `mode` and `save_last` mean what they mean to Lightning's ModelCheckpoint, `max_to_keep` what
it means to Orbax's CheckpointManager. What `latest` means is kept whatever they say: a run has to go on from something.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from holdfast.errors import PolicyConflict, UsageError
from holdfast.policy import every, keep, on
from holdfast.policy.keeping import KeepPolicy
from holdfast.policy.movements import OnImprove
from holdfast.policy.numbers import metric_name, min_or_max
from holdfast.policy.saving import SavePolicy

SAYS = (
    "save_top_k=k with monitor= keeps the k best, save_top_k=-1 all, save_last=True or save_top_k=1 alone the last, "
    "max_to_keep=n the newest n"
)


@dataclass(frozen=True, slots=True)
class Familiar:
    """The names as they were given; None where one was not."""

    save_top_k: int | None = None
    monitor: str | None = None
    mode: Literal["min", "max"] | None = None
    save_last: bool | None = None
    max_to_keep: int | None = None

    @property
    def given(self) -> list[str]:
        """As a user writes them."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return [f"{name}={value!r}" for name, value in values if value is not None]

    def policies(self, save: SavePolicy | None, kept: KeepPolicy | None) -> tuple[SavePolicy | None, KeepPolicy | None]:
        """`save` and `keep` as they are where none of the names was given, else what the names mean.

        Raises PolicyConflict where they contradict each other or `keep`.
        """
        if not self.given:
            return save, kept
        self._check_types()
        if kept is not None:
            raise self._conflict(f"keep={kept!r} says already what to keep")
        if self.mode is not None and self.monitor is None:
            raise self._conflict("mode says nothing without monitor")
        if self.max_to_keep is not None:
            if len(self.given) > 1:
                raise self._conflict("max_to_keep counts the newest, and does not mix with the others")
            return save, keep.latest(self.max_to_keep)
        if save is None and self.monitor is not None and self._top > 0:
            asked = OnImprove(self.monitor, self.mode or "min", top=self._top)
            save = every(minutes=10) | on.end() | on.signal() | asked
        return save, self._keep()

    @property
    def _top(self) -> int:
        return 1 if self.save_top_k is None else self.save_top_k

    def _keep(self) -> KeepPolicy | None:
        if self._top == -1:
            return keep.all()
        last = keep.latest(1)
        if self._top == 0:
            if not self.save_last:
                raise self._conflict("save_top_k=0 asks for no checkpoints at all")
            return last
        if self.monitor is not None:
            best = keep.best(self._top, self.monitor, self.mode or "min")
            return best | last if self.save_last else best
        if self._top > 1:
            raise self._conflict(f"the best {self._top} of what? monitor names no metric")
        return last if self.save_last or self.save_top_k == 1 else None

    def _check_types(self) -> None:
        top = self.save_top_k
        if top is not None and (isinstance(top, bool) or not isinstance(top, int) or top < -1):
            raise UsageError(
                f"save_top_k={top!r} is no whole number of at least -1", subject="save_top_k", hint="save_top_k=3"
            )
        if self.save_last is not None and not isinstance(self.save_last, bool):
            raise UsageError(
                f"save_last={self.save_last!r} is neither True nor False", subject="save_last", hint="save_last=True"
            )
        if self.monitor is not None:
            metric_name(self.monitor, 'monitor="val_loss"')
        if self.mode is not None:
            min_or_max(self.mode, self.monitor or "mode")

    def _conflict(self, why: str) -> PolicyConflict:
        return PolicyConflict(f"{', '.join(self.given)}: {why}", subject=self.given[0].partition("=")[0], hint=SAYS)
