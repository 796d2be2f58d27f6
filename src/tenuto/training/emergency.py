"""The emergency places of one training: announced when the run is claimed, used when it ends and its own store does not
take the last save."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tenuto.concurrency.deadlines import within
from tenuto.engine.save.commit_protocol import CommitProtocol, SoloCommit
from tenuto.engine.save.job import ManifestDetails
from tenuto.engine.save.rank_group import RankGroup
from tenuto.errors import RanksDisagree, RanksError, TenutoError, UsageError, in_words
from tenuto.model.ids import CheckpointId, run_key
from tenuto.ranks.agreement import Agreement
from tenuto.ranks.contract import Ranks
from tenuto.record import record
from tenuto.repo.ownership.claim import Attempt, joined
from tenuto.repo.repository import Repo
from tenuto.state.contract import Flattened
from tenuto.telemetry.heartbeat import EMERGENCY

if TYPE_CHECKING:
    from tenuto.engine.memory_tier.tier import MemoryTier

AFTER_S: Final = 10.0
"""Seconds without progress after which a run's own store counts as one that does not answer."""
MEETING_S: Final = 60.0
"""How long ranks wait for each other, beyond their patience with the store, before one of them saves elsewhere."""

Places = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def emergency_directories(given: Places | None) -> tuple[str, ...]:
    """Returns the directories and URLs of `emergency=`, in order; None: those of the environment. Raises UsageError."""
    if given is None:
        given = [one.strip() for one in os.environ.get(EMERGENCY, "").split(";") if one.strip()]
    several = [given] if isinstance(given, str | os.PathLike) else given
    found = []
    for one in several if isinstance(several, Sequence) else [several]:
        text = os.fspath(one) if isinstance(one, str | os.PathLike) else ""
        if not isinstance(text, str) or not text or "\0" in text:
            raise UsageError(
                f"emergency={given!r} is neither a directory or URL nor a list of them",
                subject="emergency",
                hint='emergency="/other-disk/emergency"',
            )
        found.append(text)
    return tuple(found)


class EmergencyPlaces:
    """Where the state goes at the end of a training if the run's own store does not take it.

    Every rank calls the same methods in the same order. after_s: without progress for so long, a store does not answer.
    """

    def __init__(
        self,
        directories: Sequence[str],
        after_s: float,
        repo: Repo,
        run: str,
        *,
        ranks: Ranks,
        group: RankGroup,
        report: Callable[[str], None],
    ) -> None:
        self._directories = [one if "://" in one else os.path.abspath(os.path.expanduser(one)) for one in directories]
        self._repo = repo
        self._run = run_key(run)
        self._ranks = ranks
        self._group = group
        self._report = report
        self.after_s = after_s
        self.patience_s = after_s if group.world_size == 1 else 3 * after_s  # a rank may wait for the slowest of all
        self.urls: list[str] = []
        """Of those that can be used, once the run is claimed."""
        self.rescued: CheckpointId | None = None
        """What was saved there."""
        self._attempt: Attempt | None = None

    @property
    def _all(self) -> list[str]:
        from tenuto.maintenance import emergency  # of no use to most trainings

        return [emergency.place_in(directory, self._repo.id) for directory in self._directories]

    @property
    def ready(self) -> bool:
        return bool(self.urls)

    def take_over(self, memory: MemoryTier | None, **options: Any) -> None:
        """Brings the run's own store the newest state that lies in one of them, on the coordinator, before the restore,
        unless a newer one lies in `memory`; what lies there of it is forgotten. `options`: of the claim."""
        if not self._directories or not self._group.coordinates:
            return
        from tenuto.maintenance import emergency

        if memory is not None:
            memory.hold()
        beyond = (0, 0) if memory is None else memory.newest_sealed()
        taken = emergency.take_over(self._repo, self._run, self._all, report=self._report, beyond=beyond, **options)
        if taken is not None and memory is not None:
            memory.forget(taken)

    def announce(self, attempt: Attempt) -> None:
        """Announces the claimed attempt in each. One that cannot be used is reported, and left out."""
        if not self._directories:
            return
        from tenuto.maintenance import emergency  # of no use to most trainings

        self._attempt = attempt
        with self._group.round("emergency") as round:
            if self._group.coordinates:
                round.broadcast(json.dumps([url for url in self._all if self._announced(url, attempt)]).encode())
            urls = json.loads(round.receive(self._group.timeout_s, "the emergency locations"))
        self.urls = []
        for url in urls:
            try:
                self._group.check_claim_visible(joined(emergency.open_place(url, self._repo), attempt.record))
                self.urls.append(url)
            except RanksDisagree as error:
                if self._group.coordinates:
                    self._report(f"{error.message}: all ranks have to share an emergency location, and it is not used")

    def _announced(self, url: str, attempt: Attempt) -> bool:
        from tenuto.maintenance import emergency  # of no use to most trainings

        try:
            work = partial(emergency.prepare, self._repo, url, attempt)
            within(emergency.ANSWER_S, f"announcing the run in {url}", work, subject=url)
        except (TenutoError, OSError) as error:
            self._report(f"the emergency location {url} cannot be used: {in_words(error)}")
            return False
        return True

    def rescue(self, flattened: Flattened, step: int, about: ManifestDetails, error: BaseException | None) -> None:
        """Saves the state in the first of them that takes it, unless the run's own store has taken it on all ranks.
        `error`: why it has not here. What goes wrong is reported."""
        if self._group.world_size == 1 and error is None:
            return
        state = _State(flattened, step, about)
        try:
            for url in self.urls:
                error = self._rescued_in(url, state, error)
                if error is None:
                    return
                self._report(f"the emergency location {url} does not take step {step} either: {in_words(error)}")
        except RanksError as trouble:
            self._report(f"step {step} goes to no emergency location: {in_words(trouble)}")

    def _rescued_in(self, url: str, state: _State, error: BaseException | None) -> BaseException | None:
        """Returns why the place has not taken the state, None where it has, or nothing was to be done."""
        if self._group.world_size == 1:
            return self._save_in(url, state, None)
        # A session for each try: one that was cut off may have opened rounds on some ranks and not on others.
        facts, deadline_s = {"emergency": url, "step": str(state.step)}, self.patience_s + MEETING_S
        with Agreement.open(self._ranks, facts, deadline_s) as agreement:
            with agreement.round("emergency") as round:
                why = "" if error is None else in_words(error)
                verdict = round.vote(error is None, why, deadline_s, "an emergency save")
            if verdict:
                return None
            return self._save_in(url, state, agreement)

    def _save_in(self, url: str, state: _State, agreement: Agreement | None) -> BaseException | None:
        from tenuto.maintenance import emergency  # of no use to most trainings

        attempt = self._attempt
        assert attempt is not None, "announced"
        try:
            there = emergency.reached_place(url, self._repo, self.after_s)
        except TenutoError as error:
            return error
        protocol: CommitProtocol
        if agreement is None:
            protocol = SoloCommit(there)
        else:
            from tenuto.engine.group.group_save import GroupCommit

            protocol = GroupCommit(there, agreement)
        try:
            self.rescued = emergency.save_there(
                there,
                attempt,
                state.flattened,
                state.step,
                state.about,
                protocol=protocol,
                patience_s=self.patience_s,
            )
        except TenutoError as error:
            return error
        if self._group.coordinates:
            self._report(
                f"step {state.step} of run {self._run} is saved in the emergency location {url}, from which the next "
                f"start takes it over: {self._repo.url} did not take it"
            )
        return None


@record
class _State:
    flattened: Flattened
    step: int
    about: ManifestDetails
