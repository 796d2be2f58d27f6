"""Going on from what the process before left in memory."""

from __future__ import annotations

from tenuto.crashpoints import crashpoint
from tenuto.engine.memory_tier.image_store import check_image
from tenuto.engine.memory_tier.tier import Candidate, MemoryTier
from tenuto.engine.read.choose import Prepare, RestoreResult, restore_checkpoint
from tenuto.errors import CorruptionError
from tenuto.events import CandidateSkipped, Emitter, RestoredFromMemory, Warned


class MemoryRestore:
    """Looks for images of one run, and restores the newest whole one that it may go on from."""

    def __init__(self, tier: MemoryTier, run: str, emitter: Emitter) -> None:
        self._tier = tier
        self._run = run
        self._emitter = emitter
        self.adopted: Candidate | None = None

    def exists(self) -> bool:
        """Whether there is one to go on from."""
        self._tier.hold()
        return bool(self._tier.candidates(_to_nobody))

    def appeared(self) -> bool:
        """Whether there is one now where the slots could not be looked into before."""
        return self._tier.hold() and bool(self._tier.candidates(_to_nobody))

    def restore(self, prepare: Prepare) -> RestoreResult | None:
        """None where there is nothing in memory to go on from; what is damaged is passed over, and told."""
        self.adopted = None
        self._tier.take_over(None)
        self._tier.hold()
        for candidate in self._tier.candidates(self._warn):
            crashpoint("memory image found, not adopted")
            try:
                result = self._restored(candidate, prepare)
            except (CorruptionError, OSError) as error:
                message = getattr(error, "message", None) or repr(error)
                self._emitter.emit(CandidateSkipped(candidate.footer.id, f"its image in memory: {message}"))
                continue
            self.adopted = candidate
            self._tier.take_over(candidate)
            footer = candidate.footer
            self._emitter.emit(RestoredFromMemory(footer.id, footer.age_s, candidate.adoptable.base))
            crashpoint("memory image adopted, not yet claimed")
            return result
        return None

    def _restored(self, candidate: Candidate, prepare: Prepare) -> RestoreResult:
        image = self._tier.open(candidate)
        try:
            if candidate.adoptable.base is None:  # nothing in the store would make good what is half filled
                check_image(image, image.repo.index(image.manifest(), image.footer.rank))
            return restore_checkpoint(image.repo, candidate.footer.id, prepare, emitter=self._emitter)
        finally:
            image.close()

    def _warn(self, message: str) -> None:
        self._emitter.emit(Warned(message, self._run))


def _to_nobody(message: str) -> None:
    """It is told when it is restored."""
