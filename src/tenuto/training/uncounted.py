"""What a loop is told about epochs and batches that are not counted as whoever wrote it may think."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tenuto.policy.save import EveryEpochs, parts_of
from tenuto.training.snapshot import UNCOUNTED

if TYPE_CHECKING:
    from tenuto.state.position.training_position import TrainingPosition
    from tenuto.training.saves import RunSaver

_COUNTED_FORMS: Final = (
    "Take them from ckpt.batches, inside ckpt.steps(n) or ckpt.epochs(n); in a loop of your own pass data that counts "
    "by itself and iterate that: tenuto.torch.resumable(loader), or anything with state_dict and load_state_dict"
)
_ONE_STEP: Final = (
    "the epoch took no batch from ckpt.batches and counts as one step: saves come at the end of an epoch, "
    "and every(steps=) counts epochs. `for batch in ckpt.batches` counts each batch"
)


def warn_of_epochs(saving: RunSaver) -> None:
    """Warns, in a loop that does not report the end of epochs, of policies that save there."""
    for part in parts_of(saving.policy):
        if isinstance(part, EveryEpochs):
            saving.warn(
                f"{part!r} saves nothing here: only the loop of epochs() knows where one ends, or "
                "one of your own that says ckpt.step_done(epoch_ended=…) after each step"
            )


class UncountedBatches:
    """Warns, once of each, of batches that a loop takes past the data of its Checkpointer."""

    def __init__(self, saving: RunSaver, position: TrainingPosition) -> None:
        self._saving = saving
        self._position = position
        self._told: set[str] = set()

    def warn(self) -> None:
        """Warns of a save where nothing counts the batches."""
        if self._position.uncounted:
            self._once(f"a resume is not exact: {UNCOUNTED}. {_COUNTED_FORMS}")

    def warn_of_one_step(self) -> None:
        """Warns of an epoch that took none of its batches from the data: none of them is a step."""
        self._once(_ONE_STEP)

    def _once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            self._saving.warn(message)
