"""When states are kept in memory, beside those that go to the store."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from tenuto.engine.memory_tier.memory_saver import MemorySaver
from tenuto.engine.memory_tier.tier import MemoryTier
from tenuto.engine.save.fenced_capture import FencedCapture
from tenuto.engine.save.job import ManifestDetails
from tenuto.engine.save.rank_group import RankGroup
from tenuto.errors import DeadlineExceeded
from tenuto.events import Emitter, SaveSkipped, Warned
from tenuto.model.ids import CheckpointId
from tenuto.policy.save import Decision, Moment, SaveHistory, SavePolicy
from tenuto.repo.ownership.claim import Attempt
from tenuto.repo.repository import Repo
from tenuto.state.contract import Flattened

MOMENTS = 4
"""States whose moment is remembered: two of them can be the newest that is sealed."""
JOIN_S = 30.0
"""How long the end of training waits for a state that is being sealed."""
BUSY = "the state taken into memory before is not sealed yet"


class MemoryCadence:
    """The memory tier of one run, with a cadence of its own.

    Several ranks keep states at the same steps, all or none of a state. So a state that is due is never left out for
    being busy, nor a torn one replaced before the next is due, for then it would be on one rank and not on another. And
    their saves to the store have memory of their own: they are shares of a state.
    """

    def __init__(
        self,
        repo: Repo,
        run: str,
        policy: SavePolicy,
        *,
        on_busy: Literal["wait", "skip"],
        budget: int | None,
        in_flight: int = 1,
        emitter: Emitter,
        warn: Callable[[str], None],
        group: RankGroup,
    ) -> None:
        self._saves_are_states = group.writes_all
        """Whether a save to the store is a state in memory as well, and this process skips and replaces by itself."""
        in_flight = in_flight if self._saves_are_states else 1
        self.tier = MemoryTier(repo, run, group=group, budget=budget, in_flight=in_flight, emitter=emitter, warn=warn)
        self.policy = policy
        self.skipped = 0
        """Steps that were due and not taken, for the one before was not sealed."""
        self.delayed = 0
        """Steps that waited for the one before to be sealed."""
        self._held_s = 0.0
        self._moments: dict[int, float] = {}
        self._run = run
        self._may_skip = on_busy == "skip" and self._saves_are_states
        self._emitter = emitter
        self._saver = MemorySaver(repo, self.tier, emitter, rank=self.tier.rank)
        self._attempt: Attempt | None = None
        self._first_step = 0
        self._before: tuple[int, int | None, float | None] | None = None
        """Of the last save to the store: its step, and what was the last state before it."""
        self._last_step: int | None = None
        self._last_s: float | None = None
        self._started_s = 0.0

    @property
    def written_from(self) -> MemoryTier | None:
        """The tier whose images saves to the store are written from; None where they have memory of their own."""
        return self.tier if self._saves_are_states else None

    def capture_fenced(self, fencing: FencedCapture) -> None:
        """From now on what optimizers own is copied beside training, as in saves to the store."""
        self._saver.fencing = fencing

    def begin(self, attempt: Attempt, flattened: Flattened, step: int, since_s: float) -> None:
        """Begins once the run is claimed, on all ranks: training resumes from `step`. `since_s`: since when its line
        has not been saved. Raises RankFailed, RanksMissing and RankStoreLost."""
        self.tier.saved_s = since_s
        self.tier.claimed(attempt, flattened)
        self._attempt = attempt
        self._first_step, self._started_s = step, time.monotonic()
        self.tier.agree()

    @property
    def kept(self) -> int:
        """States that were sealed, saves to the store not counted."""
        return self._saver.sealed

    @property
    def fence_s(self) -> float:
        """How long updates have waited for copies of states that went into memory alone."""
        return self._saver.fence_s

    @property
    def cpu_s(self) -> float:
        """Processor time of threads beside training, for states that went into memory alone."""
        return self._saver.cpu_s

    @property
    def held_s(self) -> float:
        """How long states that went into memory alone have held training, their fences included."""
        return self._held_s + self.fence_s

    @property
    def torn(self) -> int | None:
        """The step of the state that was torn, until another one is taken in its place."""
        torn = self._saver.torn
        return torn if torn == self._last_step else None

    @property
    def newest_s(self) -> float | None:
        """Of when the newest state is that is whole in memory, by the monotonic clock."""
        footer = self.tier.sealed if self.tier.on else None
        return None if footer is None else self._moments.get(footer.id.step, footer.sealed_us / 1e6)

    def saved(self, step: int) -> bool:
        """Notes that a save to the store is taken, which is sealed here as well if it is a whole state; returns whether
        it takes the place of a torn one."""
        if not self._saves_are_states:
            self.tier.saved_s = time.monotonic()
            return False
        torn = self.torn is not None
        self._before = step, self._last_step, self._last_s
        self._last_step, self._last_s = step, time.monotonic()
        self._moment(step, self._last_s)
        self.tier.saved_s = self._last_s
        return torn

    def not_saved(self, step: int) -> None:
        """The save of this step, of which `saved` was told, has failed while training waited for it. Unless it was
        sealed by then, what is due in memory is due as if it had never been taken."""
        footer, before = self.tier.sealed, self._before
        if before is not None and before[0] == step == self._last_step and (footer is None or footer.id.step != step):
            _, self._last_step, self._last_s = before

    def decide(self, moment: Moment) -> Decision:
        if not self.tier.on or self._attempt is None:
            return Decision(False, "there is no memory tier")
        history = SaveHistory(
            started_s=self._started_s,
            first_step=self._first_step,
            last_saved_step=self._last_step,
            last_saved_s=self._last_s,
        )
        decision, torn = self.policy.decide(moment, history), self.torn
        if self._saves_are_states and not decision.save and torn is not None and moment.step > torn:
            return Decision(True, f"in place of the torn state of step {torn}")
        return decision

    def skips(self, step: int) -> bool:
        """Whether the state of this step, which is due, is left out, for the one before is not sealed yet: that is
        counted and told. To be asked before the state is looked at."""
        if not self._may_skip or not self._saver.busy or self.torn is not None:
            return False  # a torn one is about to be let go
        self._skip(step, BUSY)
        return True

    def take(
        self, flattened: Flattened, step: int, about: ManifestDetails, *, due_s: float, eager: bool = False
    ) -> None:
        """Takes the state of a completed step. It fails no training: what goes wrong is told. `due_s`: since when
        training has been held for it. `eager`: with nothing left to be copied beside training."""
        assert self._attempt is not None
        torn = self.torn is not None
        self._last_s = time.monotonic()
        self._moment(step, self._last_s)
        self.delayed += self._saver.busy
        id = CheckpointId(self._attempt.run, self._attempt.number, step)
        try:
            if self._saver.save(flattened, id, about, eager=eager or torn):
                self._last_step = step
        except DeadlineExceeded as error:
            self.tier.missed(id)
            self._skip(step, error.message)
        except Exception as error:  # noqa: BLE001 - no thread to be had, no memory: training goes on without it
            self.tier.missed(id)
            why = getattr(error, "message", None) or repr(error)
            self._emitter.emit(Warned(f"step {step} is not kept in memory: {why}", self._run))
        finally:
            self._held_s += time.monotonic() - due_s

    def close(self, durable: CheckpointId | None) -> None:
        """Gives the slots back; an image of a step that is not durable stays for the next process."""
        self._saver.join(JOIN_S)
        self.tier.close(durable)

    def _moment(self, step: int, now_s: float) -> None:
        self._moments[step] = now_s
        while len(self._moments) > MOMENTS:
            del self._moments[next(iter(self._moments))]

    def _skip(self, step: int, reason: str) -> None:
        self.skipped += 1
        self._emitter.emit(SaveSkipped(self._run, step, f"{reason} ({self.skipped} skipped so far)"))
