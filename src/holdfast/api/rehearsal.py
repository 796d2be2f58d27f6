"""A Checkpointer under `holdfast certify`: in another place, saving when it is told to, telling every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.api.snapshot import Snapshots
from holdfast.errors import typed
from holdfast.guard.certify.entries import entries, mark_of
from holdfast.guard.certify.order import Order, standing
from holdfast.guard.certify.telling import Teller
from holdfast.model.trail import Row
from holdfast.policy import keep
from holdfast.policy.keeping import KeepPolicy
from holdfast.policy.saving import Moment, SaveHistory, SavePolicy
from holdfast.state.uncovered import uncovered
from holdfast.store.contract import Where
from holdfast.store.registry import open_store

if TYPE_CHECKING:
    from holdfast.api.training import Training

SAVE_DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class AtStep(SavePolicy):
    """Saves once, at this step or the first one after it; never, if it is None."""

    step: int | None

    @property
    def alike(self) -> bool:
        return True

    def wants(self, now: Moment, history: SaveHistory) -> str | None:
        saved = history.last_saved_step
        if self.step is None or now.step < self.step or (saved is not None and saved >= self.step):
            return None
        return "holdfast certify asked for it"

    def __repr__(self) -> str:
        return f"save at step {self.step}"


class Rehearsal:
    """One training of a script that is being certified."""

    def __init__(self, order: Order, rank: int, world_size: int) -> None:
        self._order = order
        self._teller = Teller(order, rank, world_size)
        self._batches: list[str | None] = []
        self.policy: SavePolicy = AtStep(order.save_at)
        self.keep: KeepPolicy = keep.latest(1)

    def place(self, where: Where, run: str) -> str:
        """The scratch place that stands for `where`. UsageError where the script means another place."""
        if not self._order.means(where):
            raise self._teller.refuse(
                f"its Checkpointer is for {open_store(where).url}, and not for the WHERE that was given",
                f"{typed('holdfast', 'certify', where)} -- …",
            )
        self._teller.begin(self._order.where, run)
        return self._order.scratch

    def attach(self, training: Training, snapshots: Snapshots, covered: tuple[Any, ...]) -> None:
        """From now on `training` tells what it does; `covered` is its state and its data."""
        self._snapshots = snapshots
        self._covered = covered
        training.on_step = self._completed
        training.claiming.on_restored = lambda: self._tell(training, start=True)
        training.position.on_batch = self._given

    def _given(self, batch: Any) -> None:
        self._batches.append(mark_of(batch))

    def _tell(self, training: Training, *, start: bool = False) -> None:
        counters = training.position.counters
        found = entries(self._snapshots.now())
        self._teller.row(
            Row(counters.step, counters.epoch, counters.batch, found, tuple(self._batches), start),
        )
        self._batches.clear()

    def _completed(self, training: Training) -> None:
        """After each step, before anything is saved for it."""
        self._teller.check_owner()
        self._tell(training)
        last = training.saving.last
        if self._order.save_at is not None and last is not None and self._order.save_at <= last.step < training.step:
            # A whole step was done beside the save. It is lost now, as the steps after a save are in a real kill.
            last.wait(SAVE_DEADLINE_S)
            self._teller.await_kill(last.step)
        if training.step >= self._order.last:
            if training.saving.company is not None:
                training.saving.company.farewell(SAVE_DEADLINE_S)  # no rank leaves while another may still need it
            self._teller.leave(self._snapshots.certificate(), uncovered(self._covered), sorted(training.saving.logged))


def rehearsal(rank: int, world_size: int) -> Rehearsal | None:
    """What this process, as a rank of its job, is to rehearse; None outside `holdfast certify`."""
    order = standing()
    return Rehearsal(order, rank, world_size) if order is not None else None


def rehearsed(where: Where) -> Where:
    """`where`, or under `holdfast certify` the scratch place that stands for it."""
    order = standing()
    return order.scratch if order is not None and order.means(where) else where
