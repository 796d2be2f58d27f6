"""The loops that count: `steps`, `epochs` and `batches`. They know what completes a step, and nothing about saving."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from tenuto.concurrency.interruption import interruptible, undisturbed
from tenuto.errors import UsageError
from tenuto.state.position.training_position import TrainingPosition


class LoopOwner(Protocol):
    position: TrainingPosition
    stopping: bool

    def open_step(self, *, given_batch: bool = False) -> None: ...

    def complete_step(self, *, epoch_ended: bool = False, ending: bool = False, rest_follows: bool = False) -> None: ...

    def end_epoch(self, *, ending: bool) -> None: ...

    def epoch_was_one_step(self) -> None: ...

    def leave_batches(self, *, none_left: bool = False) -> None: ...

    def leave_loop(self) -> None: ...


class Steps(Iterator[int]):
    """Yields the number of steps completed before each body; coming back completes the step."""

    def __init__(self, training: LoopOwner, total: int | None) -> None:
        self._training = training
        self._total = total
        self._open = False
        self._over = False
        training.position.roll_over_finished_epoch()

    def __len__(self) -> int:
        if self._total is None:
            raise TypeError("steps() without a total has no length")
        return max(self._total - self._training.position.counters.step, 0)

    def __next__(self) -> int:
        training = self._training
        counters = training.position.counters
        if self._over:
            raise StopIteration
        with undisturbed:
            if self._open:
                self._open = False
                last = self._total is not None and counters.step + 1 >= self._total
                training.complete_step(ending=last or training.stopping)
            if training.stopping or (self._total is not None and counters.step >= self._total):
                self._over = True
                training.leave_loop()
                raise StopIteration
            training.position.settle()
            training.open_step()
            self._open = True
        return counters.step


class Epochs(Iterator[int]):
    """Yields the number of epochs completed before each body; coming back ends the epoch."""

    def __init__(self, training: LoopOwner, total: int, accumulate: int) -> None:
        self._training = training
        self._total = total
        self.accumulate = accumulate
        self._open = False
        self._over = False
        self.group = 0
        """Batches of the step that is open."""
        self.began_step = 0
        self.cut_short = False
        """Whether `stop` came with batches of this epoch left: a resume continues inside the epoch."""

    def __len__(self) -> int:
        return max(self._total - self._training.position.counters.epoch, 0)

    def __next__(self) -> int:
        training = self._training
        counters = training.position.counters
        if self._over:
            raise StopIteration
        with undisturbed:
            if self._open:
                self._open = False
                if not self.cut_short:
                    last = counters.epoch + 1 >= self._total
                    self._end_epoch(ending=last or training.stopping)
            if training.stopping or counters.epoch >= self._total:
                self._over = True
                training.leave_loop()
                raise StopIteration
            if counters.batch == 0 or training.position.data is None:
                training.position.settle()
            self.began_step = counters.step
            if training.position.data is None:
                training.open_step()  # a body that takes its batches elsewhere is one step
                self.group = 1
            self._open = True
        return counters.epoch

    @property
    def unused(self) -> bool:
        """Whether a body is running that has taken no batch of its epoch: it may take its batches elsewhere."""
        return self._open and self._no_batch_taken

    @property
    def finishing(self) -> bool:
        """Whether a body is running whose batches are used up. Its rest belongs to the last step: a resume from a save
        taken now would run it again, without a batch."""
        return self._open and self.group == 0 and not self.cut_short and not self._no_batch_taken

    @property
    def none_left(self) -> bool:
        """Whether a body is running that a resume has begun behind the last batch of its epoch."""
        counters = self._training.position.counters
        return self.group == 0 and counters.step == self.began_step and counters.batch > 0

    @property
    def _no_batch_taken(self) -> bool:
        counters = self._training.position.counters
        return self.group == 0 and counters.step == self.began_step and counters.batch == 0

    def _end_epoch(self, *, ending: bool) -> None:
        if self._no_batch_taken:
            self._training.open_step()  # its batches came from elsewhere, though there are some here
            self.group = 1
            self._training.epoch_was_one_step()
        self._training.end_epoch(ending=ending)
        self.group = 0


class Batches(Iterator[Any]):
    """`for`: the rest of this epoch. `next`: rolls over from epoch to epoch (inside `steps`)."""

    def __init__(self, training: LoopOwner, epochs: Epochs | None) -> None:
        self._training = training
        self._epochs = epochs

    def __iter__(self) -> Iterator[Any]:
        return RestOfEpoch(self._training, self._epochs)

    def __next__(self) -> Any:
        position = self._training.position
        if self._epochs is not None:
            raise UsageError(
                "next(batches) rolls over from epoch to epoch, which belongs in steps()",
                subject="batches",
                hint="inside epochs(), write: for batch in ckpt.batches",
            )
        try:
            return position.next_batch()
        except StopIteration:
            used = position.counters.batch
            position.end_epoch()
            try:
                return position.next_batch()
            except StopIteration:
                raise UsageError(
                    "data yields no batches" if used == 0 else "data yielded one epoch and nothing in the next",
                    subject="data",
                    hint="pass data that can be iterated again, such as a DataLoader",
                ) from None

    def __len__(self) -> int:
        """Batches left in this epoch."""
        position = self._training.position
        length = position.batches_in_epoch
        if length is None:
            raise TypeError("this data does not say how many batches an epoch has")
        return max(length - position.counters.batch, 0)


class RestOfEpoch(Iterator[Any]):
    """Yields the remaining batches of this epoch. Inside `epochs`, taking the next one completes a step."""

    def __init__(self, training: LoopOwner, epochs: Epochs | None) -> None:
        self._training = training
        self._epochs = epochs
        self._over = False

    def __next__(self) -> Any:
        training, epochs = self._training, self._epochs
        if self._over:
            raise StopIteration
        with undisturbed:
            if epochs is not None and epochs.group >= epochs.accumulate:
                last = training.position.at_end
                self._complete(epochs, last=last)
                if training.stopping and not last:
                    self._over = epochs.cut_short = True
                    raise StopIteration
            try:
                with interruptible():
                    batch = training.position.next_batch()
            except StopIteration:
                self._over = True
                if epochs is None:
                    training.position.end_epoch()
                elif epochs.group:
                    self._complete(epochs, last=True)
                if epochs is not None:
                    training.leave_batches(none_left=epochs.none_left)
                raise
            if epochs is not None:
                if epochs.group == 0:
                    training.open_step(given_batch=True)
                epochs.group += 1
        return batch

    def _complete(self, epochs: Epochs, *, last: bool) -> None:
        epochs.group = 0
        self._training.complete_step(ending=self._training.stopping, rest_follows=last)
