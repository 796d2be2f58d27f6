"""Restoring and claiming as one of several ranks: all read what one has chosen, and one claims for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.api.claiming import Claiming
from holdfast.api.company import RESTORE_TIMES, Company
from holdfast.api.reading import ReadingTogether
from holdfast.api.recalling import AdoptingTogether
from holdfast.api.restored import Restored
from holdfast.crashpoints import crashpoint
from holdfast.engine.joint.memory import JointTier
from holdfast.engine.restore import RestoreResult
from holdfast.errors import in_words
from holdfast.events import AttemptClaimed
from holdfast.model import canonical
from holdfast.ranks.topic import Topic
from holdfast.repo.attempts import Attempt, joined
from holdfast.repo.records import decode_attempt, encode_attempt
from holdfast.repo.repository import Repo

AGAIN, CLAIMED = b"again", b"claimed"


class ClaimingTogether(Claiming):
    """As Claiming, on every rank of a job: each calls the same methods in the same order."""

    _apart = True

    def __init__(self, *words: Any, company: Company, **more: Any) -> None:
        super().__init__(*words, **more)
        self.company = company
        self._deadline_s = RESTORE_TIMES * company.timeout_s
        self._reading = ReadingTogether(self._repo, self._run, self._prepare, company=company, emitter=self._emitter)
        self.on_claimed: Callable[[Restored | None], None] | None = None
        """Called with what was restored, once the run is this job's."""
        tier = more.get("memory")
        if self.adopting is not None and isinstance(tier, JointTier):
            self.adopting = AdoptingTogether(self._repo, tier, self._run, company, self._emitter)

    def _restore(self) -> RestoreResult | None:
        crashpoint("repository opened, nothing chosen yet")
        if self._resume_from is None:
            return None
        return self._reading.restore(self._resume_from, withdrawn=self._withdrawn)

    # -- claiming ------------------------------------------------------------------------------------------------------

    def claim(self) -> Attempt:
        attempt = self._claim()
        try:
            self.company.see(attempt)
            if self.on_claimed is not None:
                self.on_claimed(self.restored)
        except BaseException:
            attempt.release()
            raise
        return attempt

    def _claim(self) -> Attempt:
        if self.company.coordinates:
            return self._claim_for_all()
        self._close_own()
        while True:
            with self._claims() as topic:
                kind, _, record = topic.hear(self._deadline_s, "the claim of the run").partition(b"\n")
            if kind == CLAIMED:
                crashpoint("claim heard, nothing saved yet")
                attempt = attempt_of(self._repo, record)
                self._emitter.emit(AttemptClaimed(self._run, attempt.number, attempt.parent))
                return attempt
            self.done = False
            self.restore()

    def _claim_for_all(self) -> Attempt:
        try:
            attempt = super().claim()
        except BaseException as error:
            if not self._reading.raised_by_all:
                with self._claims() as topic:
                    topic.fail(in_words(error))
            raise
        try:
            with self._claims() as topic:
                topic.announce(CLAIMED + b"\n" + encode_attempt(attempt.record))
        except BaseException:
            attempt.release()
            raise
        return attempt

    def _restore_anew(self) -> None:
        with self._claims() as topic:
            topic.announce(AGAIN)
        super()._restore_anew()

    def _claims(self) -> Topic:
        return self.company.agreement.topic("claim")


def attempt_of(repo: Repo, record: bytes) -> Attempt:
    """The attempt that the coordinator has claimed and announced. CorruptionError for what is no record of one."""
    said = canonical.loads(record)
    return joined(repo, decode_attempt(record, str(said["run"]), int(said["attempt"])))
