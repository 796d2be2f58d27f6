"""Where training is, and the random state that goes with it: captured with every save, put back on resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenuto.errors import CorruptionError, UsageError
from tenuto.model.records import Json, Manifest
from tenuto.state.position.positions import DataPosition, attach
from tenuto.state.position.rng import apply, capture
from tenuto.state.position.rng_streams import marks, names, of_new_rank
from tenuto.state.position.world_size_change import OrderCursor, WorldSizeChange


@dataclass(slots=True)
class Counters:
    """Completed steps and epochs, and batches that training has been given in the epoch that is open.

    Of a checkpoint also: cursor, where all ranks together were in an order that they share; the random generators that
    were `alike` on all ranks; and how many ranks have saved it.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    cursor: OrderCursor | None = None
    alike: tuple[str, ...] = ()
    ranks: int = 1

    def progress(self) -> dict[str, Json]:
        return {"step": self.step, "epoch": self.epoch, "batch": self.batch}

    @classmethod
    def of(cls, manifest: Manifest) -> Counters:
        """Where the checkpoint's training was. One of `tenuto.save` says its step alone: nobody counted epochs.

        CorruptionError where it says no step, another than its own, or what is no count.
        """
        progress = manifest.progress
        said = {"step": progress.get("step"), "epoch": progress.get("epoch", 0), "batch": progress.get("batch", 0)}
        wrong = [f"{name} {value!r}" for name, value in said.items() if type(value) is not int or value < 0]
        if not wrong and said["step"] != manifest.id.step:
            wrong = [f"step {said['step']}"]
        if wrong:
            raise CorruptionError(
                f"{manifest.id.manifest}: its progress says {', '.join(wrong)}, so how far training was is not known",
                subject=manifest.id.manifest,
                hint="tenuto.load(…) restores its state without a position",
            )
        name, alike = manifest.id.manifest, progress.get("alike", [])
        ranks = progress.get("ranks", len(manifest.indexes))  # in memory each rank has a checkpoint of its own
        if not isinstance(alike, list) or not all(isinstance(one, str) for one in alike) or type(ranks) is not int:
            raise CorruptionError(f"{name}: what it says of its ranks is malformed", subject=name)
        cursor = OrderCursor.of(progress["data"], name) if "data" in progress else None
        return cls(**said, cursor=cursor, alike=tuple(alike), ranks=max(ranks, len(manifest.indexes)))


class TrainingPosition:
    """The user's data and the random state, with the counters that say how much of the data is used.

    The order on resume is what makes it exact: saved inside an epoch, the random state is put back after the rebuilt
    iterator exists; saved at an epoch's end, before the next iterator is made (making one draws from it).
    """

    def __init__(self, data: Any, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self.reasons: tuple[str, ...] = ()
        """Why training here does not go on exactly as it would have, on as many ranks as before: of random states. Of
        the data its own position says so."""
        self.caveats: tuple[str, ...] = ()
        self.counters = Counters()
        self.data: DataPosition | None = attach(data) if data is not None else None
        self._iterator: Iterator[Any] | None = None
        self._pending: Any = None
        self.on_batch: Callable[[Any], None] | None = None
        """Called with each batch that training is given."""

    def private(self) -> dict[str, Any]:
        """What belongs to this process alone and goes into every save."""
        data = self.data.state_dict() if self.data is not None else None
        return {"data": data, "random": capture()}

    def amended(self, certificate: Mapping[str, Json], moved: WorldSizeChange | None) -> Mapping[str, Json]:
        """A checkpoint's certificate, and what is not exact because of another number of ranks."""
        if moved is None:
            return certificate
        found = dict(certificate)
        reasons = [*found.get("reasons", ()), *self.reasons, *(self.data.reasons if self.data is not None else ())]
        found["reasons"] = list(dict.fromkeys(reasons))
        found["caveats"] = [*found.get("caveats", ()), *self.caveats]
        return found | {"exact": not reasons}

    def progress(self) -> dict[str, Json]:
        """What the manifest says of where training is."""
        found = self.counters.progress()
        if self.world_size > 1:
            found["ranks"] = self.world_size
        cursor = self.data.cursor(self.counters.epoch, self.counters.batch) if self.data is not None else None
        return found if cursor is None else {**found, "data": cursor.record()}

    def marks(self) -> dict[str, str]:
        """What tells the other ranks which random generators are alike on all of them."""
        return marks(capture()) if self.world_size > 1 else {}

    def moved(self, counters: Counters) -> WorldSizeChange | None:
        """How many ranks have saved a checkpoint, where they were not as many as here."""
        saved = counters.ranks
        return None if saved == self.world_size else WorldSizeChange(saved, self.world_size, self.rank)

    def load(self, private: Mapping[str, Any], counters: Counters, moved: WorldSizeChange | None = None) -> None:
        """Takes over a checkpoint's position. The random state is put back now, and again where `settle` says.

        Of other ranks (`moved`), `private` is the random state of the one that `moved` names for this rank.
        """
        self.counters.step, self.counters.epoch, self.counters.batch = counters.step, counters.epoch, counters.batch
        self._iterator = None
        self.reasons, self.caveats = (), ()
        self._pending = private.get("random") or None
        if moved is not None:
            self._move(moved, counters)
        elif self.data is not None and private.get("data"):
            self.data.load_state_dict(private["data"])
            self.counters.batch = self.data.goes_on_after(counters.epoch, counters.batch)
        if self._pending is not None:
            apply(self._pending)

    def _move(self, moved: WorldSizeChange, counters: Counters) -> None:
        self.caveats = (f"{moved.words}: sums over ranks add up in another order, so results agree but for rounding",)
        if self.data is not None:
            self.counters.batch = self.data.move(moved, counters.cursor, counters.epoch, counters.batch)
        if self._pending is None:
            return
        alike = names(self._pending) if moved.saved == 1 else counters.alike
        own = [name for name in names(self._pending) if name not in alike]
        if moved.rank >= moved.saved:
            self._pending = of_new_rank(self._pending, alike, moved.rank)
        if own:
            self.reasons = (f"{moved.words}: {_streams(moved, own)}",)

    def roll_over_finished_epoch(self) -> None:
        """An epoch whose last batch was used is over, where epochs end by themselves (`steps`)."""
        if self.at_end:
            self._run_out()
            self.counters.epoch += 1
            self.counters.batch = 0
            self._iterator = None

    def _run_out(self) -> None:
        """The last batch of this epoch is used, but nobody has asked for another one yet: it is then that a source
        comes to its end, and some draw once more there, or go back to their beginning."""
        if self._iterator is not None:
            next(self._iterator, None)
        elif self.data is not None:
            self.data.run_out(self.counters.epoch)

    def settle(self) -> None:
        """Before the body of the first step: the random state is as it was at the save."""
        if self._pending is None:
            return
        if self.data is not None and self.counters.batch > 0 and not self.at_end:
            self.iterator()  # puts the random state back, after itself
        if self._pending is not None:
            apply(self._pending)
            self._pending = None

    def iterator(self) -> Iterator[Any]:
        """The rest of this epoch's batches; the same iterator until the epoch ends."""
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
                # Data that cannot be positioned starts its epoch again; then the count does too.
                self.counters.batch = int(getattr(self._iterator, "delivered", self.counters.batch))
            if inside and self._pending is not None:
                apply(self._pending)
                self._pending = None
        return self._iterator

    def next_batch(self) -> Any:
        """The next batch of this epoch; StopIteration at its end."""
        batch = next(self.iterator())
        self.counters.batch += 1
        if self.on_batch is not None:
            self.on_batch(batch)
        return batch

    def end_epoch(self) -> None:
        self.counters.epoch += 1
        self.counters.batch = 0
        self._iterator = None

    @property
    def batches_in_epoch(self) -> int | None:
        """How many batches this epoch has, where the data says so."""
        return self.data.batches_in(self.counters.epoch) if self.data is not None else None

    @property
    def at_end(self) -> bool:
        """Whether the last batch of this epoch is used, where the data says how many there are."""
        length = self.batches_in_epoch
        return length is not None and 0 < length <= self.counters.batch


def _streams(moved: WorldSizeChange, own: Sequence[str]) -> str:
    """What becomes of generators that each rank has a state of its own for."""
    first, last = min(moved.saved, moved.here), max(moved.saved, moved.here) - 1
    which = f"rank {first}" if first == last else f"ranks {first} to {last}"
    what = f"random generators ({', '.join(own)}) of {which}"
    if moved.here > moved.saved:
        return f"{what} begin streams of their own, derived from those of rank 0"
    return f"{what} are not gone on with"
