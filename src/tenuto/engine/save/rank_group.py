"""The processes that train one run together, as each of them sees the others; a process by itself is a group of one."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol, Self

from tenuto.engine.read.choose import restore_checkpoint, restore_latest
from tenuto.engine.save.commit_protocol import SoloCommit
from tenuto.policy.save import Decision
from tenuto.ranks.contract import TIMEOUT_S
from tenuto.repo.lineage import resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from tenuto.engine.read.choose import Prepare, RestoreResult
    from tenuto.engine.read.local_state import LocalState
    from tenuto.engine.save.commit_protocol import CommitProtocol
    from tenuto.engine.save.handle import Save
    from tenuto.errors import RanksError
    from tenuto.events import Emitter
    from tenuto.model.ids import CheckpointId
    from tenuto.policy.save import DividedPolicy, Moment, SaveHistory
    from tenuto.ranks.contract import Deadline
    from tenuto.repo.ownership.claim import Attempt
    from tenuto.repo.repository import Repo

RESTORE_TIMES: Final = 3.0
"""So many times as long for the slowest rank to read its part of a checkpoint."""


class GroupRound(Protocol):
    """One matter on which a group agrees, as a context manager: an exception that leaves the block is raised by all."""

    def broadcast(self, data: bytes) -> None:
        """Sends to all ranks, on the coordinator."""
        ...

    def receive(self, deadline: Deadline | float, phase: str = "") -> bytes:
        """Returns what the coordinator has broadcast."""
        ...

    def fail(self, reason: str, phase: str = "") -> bool:
        """Ends the round with this rank's failure; whether that stands. Raises nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Restorer(Protocol):
    """Restores one run into the state of this process."""

    raised_by_all: bool
    """Whether the last restore has ended by a vote of which all ranks know: no rank waits for more of it."""
    local: Callable[[CheckpointId], LocalState | None]
    """Returns what this rank has of a checkpoint in memory, which is closed after the restore; several ranks use it."""

    def restore(
        self, step: int | str | CheckpointId, *, withdrawn: Container[int] = frozenset()
    ) -> RestoreResult | None:
        """Restores the checkpoint that `step` means, the newest whole one for "latest"; None where the run has none.
        `withdrawn`: as `walk` has it."""
        ...

    def resume(self, resume_from: int | str | None, *, withdrawn: Container[int]) -> RestoreResult | None:
        """Restores as `restore` does, at the start of training; None where that starts afresh."""
        ...


class RankGroup(Protocol):
    """This process among those that train, save or load one run together. Used by the training thread."""

    timeout_s: float

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def coordinates(self) -> bool:
        """Whether this process claims, commits and removes for all."""
        ...

    @property
    def leads(self) -> bool:
        """Whether this process removes what is obsolete from the places that it puts packs into."""
        ...

    @property
    def writes_all(self) -> bool:
        """Whether a save of this process holds the whole state: what it writes is known before the first save."""
        ...

    @property
    def spread(self) -> bool:
        """Whether data files lie on the nodes of the ranks that wrote them."""
        ...

    @property
    def acts_at_once(self) -> bool:
        """Whether this process leaves as soon as a signal comes, without first agreeing on a step with others."""
        ...

    @property
    def loss(self) -> RanksError | None:
        """The loss after which these ranks can save nothing any more: of a rank, or of the place where they meet."""
        ...

    def on_loss(self, report: Callable[[RanksError], None]) -> None:
        """Has `report` called with the loss, once, by a thread of the group's own."""
        ...

    def round(self, kind: str) -> GroupRound:
        """Opens the next round of this kind. Every rank opens as many."""
        ...

    def protocol(self, repo: Repo) -> CommitProtocol:
        """Returns how saves of this group come to their commit."""
        ...

    def restorer(self, repo: Repo, run: str, prepare: Prepare, emitter: Emitter) -> Restorer:
        """Returns what restores a checkpoint on all ranks."""
        ...

    def expected_share(self, nbytes: int) -> int | None:
        """Returns about how much of a checkpoint of `nbytes` this process writes, where it cannot plan that before the
        first save; None where it can, or where it is unknown."""
        ...

    def agree_on_attempt(self, repo: Repo, find: Callable[[], tuple[Attempt, int]]) -> tuple[Attempt, int]:
        """Returns on all ranks what `find` gives on the coordinator: an attempt, and the step to save."""
        ...

    def check_claim_visible(self, attempt: Attempt) -> None:
        """Raises RanksDisagree, on all ranks, where one does not see this claim in its own place."""
        ...

    def completed(self, step: int, signal: str | None, *, ending: bool) -> str | None:
        """Notes that `step` is done here. Returns the signal that is acted upon now. `signal`: the one that has
        come to this process, if any; `ending`: no step follows."""
        ...

    def stops(self, wanted: bool) -> bool:
        """Returns whether training stops after the step that was completed last, on all ranks. `wanted`: whether this
        rank asks for it, now or at an earlier step."""
        ...

    def decide(
        self, policy: DividedPolicy, moment: Moment, history: SaveHistory, torn: Save | None, asked: str | None = None
    ) -> Decision:
        """Decides whether this step is saved. `torn`: a save that failed, to be replaced by the next one. `asked`: why
        somebody asks this process for a save, whatever the policy says; given once."""
        ...

    def broken_off(self, error: BaseException) -> None:
        """Notes what has ended training here, for the others."""
        ...

    def leave(self, error: BaseException) -> None:
        """Leaves the group at once, because of `error`."""
        ...

    def part(self, timeout: float, *, well: bool) -> None:
        """Leaves the group at the end. `well`: only once all have come so far, or `timeout` seconds have passed."""
        ...

    def farewell(self, timeout: float) -> None:
        """Waits until all have come to the end, once, `timeout` seconds at most."""
        ...


# --------------------------------------------------------------------------------------------------
# One process by itself.


class SoloRound:
    """A round of one process: it receives what it has broadcast."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = b""

    def broadcast(self, data: bytes) -> None:
        self._data = data

    def receive(self, deadline: Deadline | float, phase: str = "") -> bytes:
        return self._data

    def fail(self, reason: str, phase: str = "") -> bool:
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class SoloRestorer:
    """Restores a run into the state of the only process."""

    raised_by_all = False

    def __init__(self, repo: Repo, run: str, prepare: Prepare, emitter: Emitter) -> None:
        self._repo = repo
        self._run = run
        self._prepare = prepare
        self._emitter = emitter
        self.local: Callable[[CheckpointId], LocalState | None] = lambda id: None

    def restore(
        self, step: int | str | CheckpointId, *, withdrawn: Container[int] = frozenset()
    ) -> RestoreResult | None:
        if step == "latest":
            return restore_latest(self._repo, self._run, self._prepare, emitter=self._emitter, withdrawn=withdrawn)
        return restore_checkpoint(
            self._repo, resolve(self._repo, self._run, step), self._prepare, emitter=self._emitter
        )

    def resume(self, resume_from: int | str | None, *, withdrawn: Container[int]) -> RestoreResult | None:
        return None if resume_from is None else self.restore(resume_from, withdrawn=withdrawn)


class SoloGroup:
    """A group of one: it agrees with itself at once, without a thread or any I/O."""

    rank = 0
    world_size = 1
    coordinates = True
    leads = True
    writes_all = True
    spread = False
    acts_at_once = True
    loss = None

    def __init__(self) -> None:
        self.timeout_s = TIMEOUT_S

    def on_loss(self, report: Callable[[RanksError], None]) -> None:
        """Does nothing: there is no other process to lose."""

    def round(self, kind: str) -> SoloRound:
        return SoloRound()

    def protocol(self, repo: Repo) -> SoloCommit:
        return SoloCommit(repo)

    def restorer(self, repo: Repo, run: str, prepare: Prepare, emitter: Emitter) -> SoloRestorer:
        return SoloRestorer(repo, run, prepare, emitter)

    def expected_share(self, nbytes: int) -> int | None:
        return None

    def agree_on_attempt(self, repo: Repo, find: Callable[[], tuple[Attempt, int]]) -> tuple[Attempt, int]:
        return find()

    def check_claim_visible(self, attempt: Attempt) -> None:
        """It has claimed the run itself."""

    def completed(self, step: int, signal: str | None, *, ending: bool) -> str | None:
        return signal

    def stops(self, wanted: bool) -> bool:
        return wanted

    def decide(
        self, policy: DividedPolicy, moment: Moment, history: SaveHistory, torn: Save | None, asked: str | None = None
    ) -> Decision:
        decision = policy.whole.decide(moment, history)
        if not decision.save and asked is not None and moment.step > (history.last_saved_step or 0):
            return Decision(True, asked)
        if not decision.save and torn is not None and moment.step > torn.step:
            return Decision(True, f"in place of the torn save of step {torn.step}")
        return decision

    def broken_off(self, error: BaseException) -> None:
        """Does nothing: no other process waits for it."""

    def leave(self, error: BaseException) -> None:
        """Does nothing: no other process waits for it."""

    def part(self, timeout: float, *, well: bool) -> None:
        """Does nothing: no other process waits for it."""

    def farewell(self, timeout: float) -> None:
        """Does nothing: there is no other process."""
