"""Resuming from what the processes before left in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from tenuto.crashpoints import crashpoint
from tenuto.engine.group.group import JobGroup
from tenuto.engine.memory_tier.eligibility import Candidate
from tenuto.engine.memory_tier.group.group_restore import CommonImages
from tenuto.engine.memory_tier.image_store import check_image
from tenuto.engine.memory_tier.tier import MemoryTier
from tenuto.engine.read.choose import Prepare, RestoreResult, restore_checkpoint
from tenuto.engine.save.rank_group import RankGroup
from tenuto.errors import CorruptionError
from tenuto.events import CandidateSkipped, Emitter, RestoredFromMemory, Warned
from tenuto.repo.repository import Repo

RestoreImage = Callable[[Prepare], tuple[Candidate, RestoreResult] | None]
"""Restores one image; None, on all ranks, where it is damaged on one, which is reported."""


class EligibleImages(Protocol):
    """The images of one run from which a group may resume."""

    def find(self, report: Callable[[str], None]) -> Sequence[RestoreImage]:
        """Returns what restores each, newest first, the same on all ranks. `report`: called with why another is passed
        over."""
        ...

    def appeared(self) -> bool:
        """Returns whether there is one now where the slots could not be opened before."""
        ...


class MemoryRestore:
    """Looks for images of one run, and restores the newest whole one from which the group may resume. Every rank calls
    the same methods in the same order."""

    def __init__(self, repo: Repo, tier: MemoryTier, run: str, group: RankGroup, emitter: Emitter) -> None:
        self._tier = tier
        self._run = run
        self._emitter = emitter
        self._images: EligibleImages = (
            CommonImages(repo, tier, run, group, emitter) if isinstance(group, JobGroup) else OwnImages(tier, emitter)
        )
        self.adopted: Candidate | None = None

    def exists(self) -> bool:
        """Returns whether there is an image to resume from."""
        return bool(self._images.find(_ignore))

    def appeared(self) -> bool:
        """Returns whether there is one now where the slots could not be opened before."""
        return self._images.appeared()

    def restore(self, prepare: Prepare) -> RestoreResult | None:
        """Restores from memory; None where nothing there can be resumed from. Damaged images are passed over, and
        reported."""
        self.adopted = None
        self._tier.take_over(None)
        for restore_image in self._images.find(self._warn):
            crashpoint("memory image found, not adopted")
            restored = restore_image(prepare)
            if restored is not None:
                self._adopt(restored[0])
                return restored[1]
        return None

    def _adopt(self, candidate: Candidate) -> None:
        self.adopted = candidate
        self._tier.take_over(candidate)
        footer = candidate.footer
        self._emitter.emit(RestoredFromMemory(footer.id, footer.age_s, candidate.adoptable.base))
        crashpoint("memory image adopted, not yet claimed")

    def _warn(self, message: str) -> None:
        self._emitter.emit(Warned(message, self._run))


class OwnImages:
    """The images of one process by itself."""

    def __init__(self, tier: MemoryTier, emitter: Emitter) -> None:
        self._tier = tier
        self._emitter = emitter

    def find(self, report: Callable[[str], None]) -> Sequence[RestoreImage]:
        self._tier.hold()
        return [partial(self._restore, candidate) for candidate in self._tier.candidates(report)]

    def appeared(self) -> bool:
        return self._tier.hold() and bool(self._tier.candidates(_ignore))

    def _restore(self, candidate: Candidate, prepare: Prepare) -> tuple[Candidate, RestoreResult] | None:
        try:
            return candidate, self._restored(candidate, prepare)
        except (CorruptionError, OSError) as error:
            message = getattr(error, "message", None) or repr(error)
            self._emitter.emit(CandidateSkipped(candidate.footer.id, f"its image in memory: {message}"))
            return None

    def _restored(self, candidate: Candidate, prepare: Prepare) -> RestoreResult:
        image = self._tier.open(candidate)
        try:
            if candidate.adoptable.base is None:  # nothing in the store would make good what is half filled
                check_image(image, image.repo.index(image.manifest(), image.footer.rank))
            return restore_checkpoint(image.repo, candidate.footer.id, prepare, emitter=self._emitter)
        finally:
            image.close()


def _ignore(message: str) -> None:
    """Reports nothing: it is reported at the restore."""
