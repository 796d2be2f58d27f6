"""The position of training and its random state: captured with every save, restored on resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenuto.errors import CorruptionError, UsageError
from tenuto.model.exactness import judged
from tenuto.model.records import Json, Manifest
from tenuto.state.position.positions import DataPosition, OrderCursor, WorldSizeChange, attach
from tenuto.state.position.rng import apply, capture, marks, names, of_new_rank


@dataclass(slots=True)
class Counters:
    """Completed steps and epochs, and batches delivered in the open epoch.

    Those of a checkpoint also have:

    - `cursor`: the position of all ranks together in a shared order.
    - `alike`: the random generators that were equal on all ranks.
    - `ranks`: the number of ranks that saved it.
    - `lost`: the ranks among them whose own values it does not have (`maintenance/gather`).
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    cursor: OrderCursor | None = None
    alike: tuple[str, ...] = ()
    ranks: int = 1
    lost: tuple[int, ...] = ()

    def progress(self) -> dict[str, Json]:
        return {"step": self.step, "epoch": self.epoch, "batch": self.batch}

    @classmethod
    def of(cls, manifest: Manifest) -> Counters:
        """Reads the counters of a checkpoint. One made by `tenuto.save` has only a step.

        Raises CorruptionError for a missing or foreign step, and for values that are no counts.
        """
        progress = manifest.progress
        counts = {"step": progress.get("step"), "epoch": progress.get("epoch", 0), "batch": progress.get("batch", 0)}
        wrong = [f"{name} {value!r}" for name, value in counts.items() if type(value) is not int or value < 0]
        if not wrong and counts["step"] != manifest.id.step:
            wrong = [f"step {counts['step']}"]
        if wrong:
            raise CorruptionError(
                f"{manifest.id.manifest}: its progress says {', '.join(wrong)}, so how far training was is not known",
                subject=manifest.id.manifest,
                hint="tenuto.load(…) restores its state without a position",
            )
        name, alike = manifest.id.manifest, progress.get("alike", [])
        ranks = progress.get("ranks", len(manifest.indexes))  # in memory each rank has a checkpoint of its own
        lost = progress.get("lost", [])
        lists = isinstance(alike, list) and isinstance(lost, list) and type(ranks) is int
        if not lists or not all(isinstance(one, str) for one in alike) or not _are_some_of(lost, ranks):
            raise CorruptionError(f"{name}: what it says of its ranks is malformed", subject=name)
        cursor = OrderCursor.of(progress["data"], name) if "data" in progress else None
        ranks = max(ranks, len(manifest.indexes))
        return cls(**counts, cursor=cursor, alike=tuple(alike), ranks=ranks, lost=tuple(lost))


class TrainingPosition:
    """The user's data, the random state, and the counters of consumed data.

    The order on resume makes it exact: saved inside an epoch, the random state is restored after the iterator is
    rebuilt; saved at the end of an epoch, before the next iterator is made (which draws from it).
    """

    def __init__(self, data: Any, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self.reasons: tuple[str, ...] = ()
        """Why training does not resume exactly on the same number of ranks, as far as random states are concerned. The
        data's own position has its own reasons."""
        self.caveats: tuple[str, ...] = ()
        self.counters = Counters()
        self.data: DataPosition | None = attach(data) if data is not None else None
        self._iterator: Iterator[Any] | None = None
        self._taken = False
        """Whether this loop takes its batches from the position, which counts them."""
        self.uncounted = False
        """Whether steps were completed on batches that nothing has counted, though there is data."""
        self.epochs_told = False
        """Whether a loop of the user's own counts its epochs, and not the data."""
        self._pending: Any = None
        """The random state that was restored, until the first step is completed or `settle` has restored it."""
        self.on_batch: Callable[[Any], None] | None = None
        """Called with each batch that is delivered."""

    def private(self) -> dict[str, Any]:
        """Returns what belongs to this process alone and goes into every save."""
        data = self.data.state_dict() if self.data is not None else None
        return {"data": data, "random": capture()}

    def amended(self, certificate: Mapping[str, Json], moved: WorldSizeChange | None) -> Mapping[str, Json]:
        """Returns a checkpoint's certificate with what another number of ranks makes inexact."""
        if moved is None:
            return certificate
        found = {name: value for name, value in certificate.items() if name != "proof"}  # of as many ranks as saved
        own = self.data.reasons if self.data is not None else ()
        reasons = [*found.get("reasons", ()), *self.reasons, *own, *self.caveats]
        return judged(found | {"reasons": list(dict.fromkeys(reasons))})

    def progress(self) -> dict[str, Json]:
        """Returns the manifest's record of the position."""
        found = self.counters.progress()
        if self.world_size > 1:
            found["ranks"] = self.world_size
        cursor = self.data.cursor(self.counters.epoch, self.counters.batch) if self.data is not None else None
        return found if cursor is None else {**found, "data": cursor.record()}

    def marks(self) -> dict[str, str]:
        """Returns the digests by which ranks find the random generators that are equal on all of them."""
        return marks(capture()) if self.world_size > 1 else {}

    def moved(self, counters: Counters) -> WorldSizeChange | None:
        """Returns the change of the ranks since a checkpoint: of their number, or this one is new to it; else None."""
        moved = WorldSizeChange(counters.ranks, self.world_size, self.rank, counters.lost)
        return moved if moved.new or moved.saved != moved.here else None

    def load(self, private: Mapping[str, Any], counters: Counters, moved: WorldSizeChange | None = None) -> None:
        """Takes over the position of a checkpoint. Restores the random state now, and again in `settle`.

        With `moved`, `private` is the random state of the rank that `moved` names for this one.
        """
        self.counters.step, self.counters.epoch, self.counters.batch = counters.step, counters.epoch, counters.batch
        self._iterator = None
        self._taken = self.uncounted = False
        self.reasons, self.caveats = (), ()
        self._pending = private.get("random") or None
        if moved is not None:
            self._move(moved, counters)
        elif self.data is not None and private.get("data"):
            self.data.load_state_dict(private["data"])
            self.counters.batch = self.data.resumes_after(counters.epoch, counters.batch)
        if self._pending is not None:
            apply(self._pending)

    def _move(self, moved: WorldSizeChange, counters: Counters) -> None:
        if moved.saved != moved.here:
            order = "sums over ranks add up in another order, so results agree but for rounding"
            self.caveats = (f"{moved.words}: {order}",)
        if self.data is not None:
            self.counters.batch = self.data.move(moved, counters.cursor, counters.epoch, counters.batch)
        if self._pending is None:
            return
        alike = names(self._pending) if moved.saved == 1 else counters.alike
        own = [name for name in names(self._pending) if name not in alike]
        if moved.new:
            self._pending = of_new_rank(self._pending, alike, moved.rank)
        if own and moved.saved != moved.here:  # of ranks that are lost the certificate says it, on all of them
            self.reasons = (f"{moved.words}: {_streams(moved, own)}",)

    def roll_over_finished_epoch(self) -> None:
        """Begins the next epoch if the last batch was used, where epochs end by themselves (`steps`)."""
        if self.at_end:
            self._run_out()
            self.counters.epoch += 1
            self.counters.batch = 0
            self._iterator = None

    def _run_out(self) -> None:
        """Exhausts the source after the last batch of the epoch: some draw once more at their end, or rewind, when
        another batch is requested."""
        if self._iterator is not None:
            next(self._iterator, None)
        elif self.data is not None:
            self.data.run_out(self.counters.epoch)

    def settle(self) -> None:
        """Restores the random state of the save, before the body of the first step."""
        if self._pending is None:
            return
        if self.data is not None and self.counters.batch > 0 and not self.at_end:
            self.iterator()  # restores the random state after itself
        if self._pending is not None:
            apply(self._pending)
            self._pending = None

    def restore_random_state(self) -> None:
        """Restores the random state of the save once more, in a loop that does not call `settle`."""
        if self._pending is not None:
            apply(self._pending)

    def complete_step(self, *, own_loop: bool = False) -> None:
        """Counts a completed step. `own_loop`: one of the user's own, which takes its batches elsewhere."""
        self.counters.step += 1
        self._pending = None
        if own_loop:
            self._taken = False
            if self.data is not None and self.data.in_source:
                epoch, delivered, ended = self.data.at
                self.counters.batch = 0 if ended else delivered
                if not self.epochs_told and (delivered or not ended):
                    self.counters.epoch = epoch + ended
        self.uncounted = self.data is not None and not self._taken and not self.data.in_source

    def iterator(self) -> Iterator[Any]:
        """Returns the rest of this epoch's batches; the same iterator until the epoch ends."""
        if self.data is None:
            raise UsageError(
                "this Checkpointer was given no data=", subject="batches", hint="Checkpointer(..., data=loader)"
            )
        if self._iterator is None:
            inside = self.counters.batch > 0
            if self.at_end:
                self._run_out()
                self._iterator = iter(())
            else:
                self._iterator = self.data.iterate(self.counters.epoch, self.counters.batch)
                # Data that cannot be positioned restarts its epoch; then the count restarts too.
                self.counters.batch = int(getattr(self._iterator, "delivered", self.counters.batch))
            if inside and self._pending is not None:
                apply(self._pending)
                self._pending = None
        return self._iterator

    def next_batch(self) -> Any:
        """Returns the next batch of this epoch. Raises StopIteration at its end."""
        batch = next(self.iterator())
        self.counters.batch += 1
        self._taken, self.uncounted = True, False
        if self.on_batch is not None:
            self.on_batch(batch)
        return batch

    def end_epoch(self) -> None:
        self.counters.epoch += 1
        self.counters.batch = 0
        self.uncounted = False  # the next epoch begins at its beginning, whoever gave the batches of this one
        self._iterator = None

    @property
    def batches_in_epoch(self) -> int | None:
        """The number of batches in this epoch, if the data knows it."""
        return self.data.batches_in(self.counters.epoch) if self.data is not None else None

    @property
    def at_end(self) -> bool:
        """Whether the last batch of this epoch is used, if the data knows its length."""
        length = self.batches_in_epoch
        return length is not None and 0 < length <= self.counters.batch


def _are_some_of(lost: Sequence[Json], ranks: int) -> bool:
    """Returns whether these are some numbers of so many ranks, and not all of them."""
    return len(lost) < max(ranks, 1) and all(type(one) is int and 0 <= one < ranks for one in lost)


def _streams(moved: WorldSizeChange, own: Sequence[str]) -> str:
    """Describes what happens to generators with a state per rank."""
    first, last = min(moved.saved, moved.here), max(moved.saved, moved.here) - 1
    which = f"rank {first}" if first == last else f"ranks {first} to {last}"
    what = f"random generators ({', '.join(own)}) of {which}"
    if moved.here > moved.saved:
        return f"{what} begin streams of their own, derived from those of rank 0"
    return f"{what} are dropped"
