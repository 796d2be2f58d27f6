"""The ranks of one job, forked from this process: how each is to die, and what each has to tell at its end."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from campaigns.rank_kills.training import Numbers
from tenuto.crashpoints import armed
from tenuto.errors import RanksError
from tenuto.policy import every, keep, on
from tenuto.ranks.contract import Ranks
from tenuto.ranks.kv.shared_files import SharedFiles
from tenuto.repo.replicated.places import PerNode
from tenuto.training import exit_status
from tenuto.training.checkpointer import Checkpointer

POLL_S: Final = 0.005
Work = Callable[["Plan", int], Mapping[str, Any]]
"""What one rank does; what it returns is told to the parent."""


@dataclass(frozen=True, slots=True)
class Death:
    """`number` is sent to `rank`: by itself when it comes to the crash point `point` for the `nth` time, or has
    computed `step`; without either by the parent, `after_s` seconds after the start."""

    rank: int
    point: str = ""
    nth: int = 1
    step: int = 0
    after_s: float = 0.0
    number: signal.Signals = signal.SIGKILL

    def strike(self) -> None:
        """What becomes of the rank that has come to the point."""
        os.kill(os.getpid(), self.number)


@dataclass(frozen=True, slots=True)
class Plan:
    """A job at `place`: its checkpoints, and the directory in which its ranks meet. `step_s`: how long a step takes at
    least."""

    place: Path
    world: int
    steps: int
    save_every: int = 3
    timeout_s: float = 8.0
    step_s: float = 0.0
    death: Death | None = None
    in_flight: int = 1
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def where(self) -> Path:
        return self.place / "checkpoints"

    @property
    def struck(self) -> Path:
        """Where the moment is noted at which the death came."""
        return self.place / "struck"

    def raised(self, rank: int) -> Path:
        """Where the moment is noted at which the training of this rank met an error."""
        return self.place / f"raised-{rank}"

    def ranks(self, rank: int) -> Ranks:
        return SharedFiles(self.place / "ranks", rank=rank, world_size=self.world)


def train(plan: Plan, rank: int) -> Mapping[str, Any]:
    """Trains to the end of the plan."""
    numbers = Numbers(rank, plan.world)
    arguments: dict[str, Any] = {"on_error": "raise", "keep": keep.latest(2), **plan.more}
    node = arguments.pop("node", None)
    where = plan.where if node is None else on_its_node(plan, node(rank))
    save = arguments.pop("save", every(steps=plan.save_every) | on.end() | on.signal())
    with Checkpointer(
        where,
        numbers.state(),
        save=save,
        ranks=plan.ranks(rank),
        ranks_timeout=plan.timeout_s,
        in_flight=plan.in_flight,
        **arguments,
    ) as ckpt:
        with raising_noted(plan.raised(rank)):
            for number in ckpt.steps(plan.steps):
                numbers.step(number + 1)
                death = plan.death
                if death is not None and (death.rank, death.step) == (rank, number + 1):
                    note_moment(plan.struck)
                    death.strike()
                if plan.step_s:
                    time.sleep(plan.step_s)
    return {"step": ckpt.step}


def on_its_node(plan: Plan, node: str) -> PerNode:
    """Packs on a disk of the node's own."""
    return PerNode(plan.place / node, home=plan.where, node=node)


@contextmanager
def raising_noted(path: Path) -> Iterator[None]:
    """When something is raised within the block, the moment is noted: before the rank leaves the others, which takes
    its own time."""
    try:
        yield
    except BaseException:
        note_moment(path)
        raise


def note_moment(path: Path) -> None:
    """Now, by a clock that all processes of a machine share."""
    path.write_text(repr(time.monotonic()))


def moment(path: Path) -> float | None:
    return float(path.read_text()) if path.exists() else None


@dataclass(frozen=True, slots=True)
class Ended:
    """`status`: exit status, or minus the signal. `told`: what the rank says of itself; nothing, if it was killed."""

    status: int
    told: Mapping[str, Any]
    seconds: float


@dataclass
class Job:
    """As a context manager it kills what is left of it."""

    plan: Plan
    work: Work = train
    pids: dict[int, int] = field(default_factory=dict)
    ended: dict[int, Ended] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    killed: bool = False
    """Whether the death that is planned for a moment has come."""

    def __enter__(self) -> Job:
        self.plan.place.mkdir(parents=True, exist_ok=True)
        self.plan.struck.unlink(missing_ok=True)
        for rank in range(self.plan.world):
            self._answer_file(rank).unlink(missing_ok=True)
            self.plan.raised(rank).unlink(missing_ok=True)
        for rank in range(self.plan.world):
            self.pids[rank] = self._forked(rank)
        return self

    def __exit__(self, *_: object) -> None:
        for rank in [rank for rank in self.pids if rank not in self.ended]:
            os.kill(self.pids[rank], signal.SIGKILL)
        self.wait(60)

    def poll(self) -> bool:
        """Whether all have ended. Sends what is due meanwhile."""
        self._strike()
        for rank, pid in self.pids.items():
            if rank not in self.ended:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    seconds = time.monotonic() - self.began
                    self.ended[rank] = Ended(os.waitstatus_to_exitcode(status), self._read(rank), seconds)
        return len(self.ended) == len(self.pids)

    def wait(self, seconds: float, without: Sequence[int] = ()) -> bool:
        """Whether all, those `without` left out, have ended within that time."""
        until = time.monotonic() + seconds
        while not self.poll() and not self.pids.keys() - self.ended.keys() <= set(without):
            if time.monotonic() > until:
                return False
            time.sleep(POLL_S)
        return True

    def send(self, rank: int, number: signal.Signals) -> None:
        if rank not in self.ended:
            os.kill(self.pids[rank], number)

    def doing(self, rank: int) -> str:
        """What the rank has said last with a sign of life that it does."""
        sessions = self.plan.place / "ranks" / "tenuto" / "sessions"
        beats = sorted(sessions.glob(f"*/beat/{rank}"), key=lambda path: path.stat().st_mtime)
        try:
            return str(json.loads(beats[-1].read_bytes())["phase"]) if beats else ""
        except (OSError, ValueError):
            return ""

    def _strike(self) -> None:
        death = self.plan.death
        if death is None or death.point or death.step or self.killed or time.monotonic() - self.began < death.after_s:
            return
        self.killed = death.rank not in self.ended
        note_moment(self.plan.struck)
        self.send(death.rank, death.number)

    @property
    def struck_at(self) -> float | None:
        """When the death came, if it did; by the clock of `began`."""
        return moment(self.plan.struck)

    def met_error_at(self, rank: int) -> float:
        """When this rank, which has ended, met its error: in a step, or, where no step did, at its end."""
        found = moment(self.plan.raised(rank))
        return self.began + self.ended[rank].seconds if found is None else found

    def _answer_file(self, rank: int) -> Path:
        return self.plan.place / f"rank-{rank}.json"

    def _read(self, rank: int) -> Mapping[str, Any]:
        path = self._answer_file(rank)
        return json.loads(path.read_text()) if path.exists() else {}

    def _forked(self, rank: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            self._live(rank)
        finally:
            os._exit(99)

    def _live(self, rank: int) -> None:
        """In the child: works, tells, and ends as a process of its own would."""
        atexit._clear()
        with open(self.plan.place / f"rank-{rank}.log", "a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        warnings.simplefilter("ignore")
        status, told = 0, {}
        try:
            with ExitStack() as stack:
                death = self.plan.death
                if death is not None and death.rank == rank and death.point:
                    stack.enter_context(armed(death.point, _dying(death, self.plan.struck)))
                told = dict(self.work(self.plan, rank))
        except SystemExit as leaving:
            status = int(leaving.code or 0)
        except BaseException as error:  # noqa: BLE001 - told to the parent
            traceback.print_exc()
            status, told = 1, _of(error)
        exit_status._ending.close_all()
        told["unsaved"] = list(exit_status._ending.failures.values())
        answer = self._answer_file(rank)
        whole = answer.with_suffix(".new")  # whoever is killed here has said nothing, not half of it
        whole.write_text(json.dumps(told))
        whole.replace(answer)
        sys.stdout.flush()
        sys.stderr.flush()
        exit_status._ending.run()
        os._exit(status)


def _of(error: BaseException) -> dict[str, Any]:
    """The error, and the agreement between ranks that is behind it."""
    told: dict[str, Any] = {"error": type(error).__name__, "message": str(error), "ranks": [], "phase": ""}
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RanksError):
            told |= {"behind": type(cause).__name__, "ranks": list(cause.ranks), "phase": cause.phase}
            break
        cause = cause.__cause__
    return told


def _dying(death: Death, noted: Path) -> Callable[[], None]:
    left = [death.nth]

    def die() -> None:
        left[0] -= 1
        if left[0] == 0:
            note_moment(noted)
            death.strike()

    return die
