"""Claiming a run for what is to be saved, where that neither hides checkpoints nor counts a step that is not there."""

from __future__ import annotations

from holdfast.api.training import Training
from holdfast.errors import UsageError


def claim_to_save(training: Training, checkpointer: object) -> None:
    """Claims the run, unless a save would then hide what nobody has restored (UsageError)."""
    if not training.claiming.done and training.claiming.hidden_by_saving():
        raise UsageError(
            f"run {training.run!r} has checkpoints, and nothing was restored: saving would hide them",
            subject=training.run,
            hint="call ckpt.restore() first, or pass resume_from=None to start afresh on purpose",
        )
    training.claim(checkpointer)


def claim_to_count(training: Training, checkpointer: object) -> bool:
    """As to save; whether the step that is done counts. It does not where another process has committed since the
    restore: what that one saved is in the state now, and training goes on from there."""
    before, step = training.claiming.restored, training.step
    claim_to_save(training, checkpointer)
    found = training.claiming.restored
    if found is before or found is None:
        return True
    training.saving.warn(
        f"step {step + 1} is dropped: another process had committed step {found.step} before this one owned the "
        "run, and training goes on from there"
    )
    return False
