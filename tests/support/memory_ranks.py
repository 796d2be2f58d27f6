"""A small training of several ranks that keep their states in memory, each a forked process that can be killed."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import tenuto
from support.memory_training import Kill, Life, Log, fork_off, read
from tenuto import every, on
from tenuto.crashpoints import armed
from tenuto.engine.staging import slots

ROWS, WIDTH = 60, 500


class Pace:
    """A rank begins a step once all others have completed the one before, as training's own collectives see to."""

    def __init__(self, directory: Path, rank: int, ranks: int) -> None:
        directory.mkdir(exist_ok=True)
        self._own = directory / str(rank)
        self._others = [directory / str(other) for other in range(ranks) if other != rank]

    def completed(self, step: int) -> None:
        self._own.with_suffix(".new").write_text(str(step))
        self._own.with_suffix(".new").rename(self._own)
        until = time.monotonic() + 60
        while not all(_number(other) >= step for other in self._others):
            assert time.monotonic() < until, "another rank does not come"
            time.sleep(0.0005)


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return -1


def cut(rank: int, ranks: int) -> slice:
    return slice(ROWS * rank // ranks, ROWS * (rank + 1) // ranks)


@dataclass(frozen=True)
class Layout:
    """What ranks hold. `replicas`: how many hold the same rows; `own`: whether each has a counter of its own, which
    draws from its generator; `alike`: whether the generators of all are."""

    replicas: int = 1
    own: bool = True
    alike: bool = False

    def parts(self, ranks: int) -> int:
        return max(ranks // self.replicas, 1)

    def rows(self, rank: int, ranks: int) -> slice:
        parts = self.parts(ranks)
        return cut(rank % parts, parts)

    def seed(self, rank: int) -> None:
        seed = 5 if self.alike else 5 + rank
        np.random.seed(seed)
        random.seed(seed)

    def state_of(self, rank: int, ranks: int) -> dict[str, Any]:
        """Rows of a table, a vector that all have, a counter of this rank's."""
        rows = self.rows(rank, ranks)
        table: Any = np.zeros((rows.stop - rows.start, WIDTH), np.float32)
        if self.parts(ranks) > 1:
            table = tenuto.shard(table, whole=(ROWS, WIDTH), offsets=(rows.start, 0))
        own = {"own": tenuto.per_rank({"count": np.zeros(3)})} if self.own else {}
        return {"table": table, "bias": np.zeros(7), **own, "history": [0.0]}

    def advance(self, state: dict[str, Any], step: int, rank: int, ranks: int) -> float:
        """One step: equal for any number of ranks, but for what is each rank's own. Returns what this rank's generator
        drew."""
        drawn = np.random.default_rng(step).standard_normal((ROWS, WIDTH)).astype(np.float32)
        _table(state)[:] += drawn[self.rows(rank, ranks)]
        state["bias"] *= 0.5
        state["bias"] += drawn[0, :7]
        own = np.random.standard_normal(3)
        if self.own:
            state["own"].value["count"] += own + rank
        state["history"][0] = float(state["bias"].sum())
        return float(own[0])


def _table(state: dict[str, Any]) -> Any:
    return state["table"] if isinstance(state["table"], np.ndarray) else state["table"].value


def digest_of(state: dict[str, Any]) -> str:
    own = [state["own"].value["count"]] if "own" in state else []
    parts = (_table(state), state["bias"], *own, np.array(state["history"]))
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()


def untouched(ranks: int, steps: int = 40, layout: Layout | None = None) -> list[dict[int, str]]:
    """The digest of every step of each rank, in a training that nobody kills."""
    before, layout = np.random.get_state(), layout or Layout()
    found: list[dict[int, str]] = []
    try:
        for rank in range(ranks):
            layout.seed(rank)
            state = layout.state_of(rank, ranks)
            found.append({0: digest_of(state)})
            for step in range(1, steps + 1):
                layout.advance(state, step, rank, ranks)
                found[-1][step] = digest_of(state)
    finally:
        np.random.set_state(before)
    return found


OnStep = Callable[[Any, int, int], None]


@dataclass(frozen=True)
class Ends:
    """When one rank is killed: once it has completed `step` (`settled`: and all ranks are known to have it in memory),
    or the `count`-th time that it comes to the crash point `at`. `alone`: it ends there, and no launcher minds."""

    step: int | None = None
    settled: bool = False
    at: str = ""
    count: int = 1
    alone: bool = False


def train(where: Path, log: Log, steps: int, rank: int, ranks: int, pace: Path, end: Ends, **options: Any) -> None:
    layout: Layout = options.pop("layout", Layout())
    layout.seed(rank)
    state = layout.state_of(rank, ranks)
    on_step: OnStep | None = options.pop("on_step", None)
    options = {"save": every(steps=10) | on.end(), "memory": every(steps=1), "ranks_timeout": 30.0, **options}
    own_loop = options.pop("own_loop", False)
    options.update(options.pop("of_rank", lambda rank: {})(rank))
    met = where.parent / f"{pace.name}-ranks"
    if ranks > 1:
        options["ranks"] = tenuto.SharedFiles(met, rank=rank, world_size=ranks)
    beside = Pace(pace, rank, ranks)
    with tenuto.Checkpointer(where, state, sinks=[log], **options) as ckpt:
        found = ckpt.restore()
        skipped = [id.step for id, _ in found.skipped] if found is not None else []
        source = found.source if found is not None else ""
        parts = found.ranks.parts if found is not None and found.ranks is not None else {}
        each = {name: list(parts[name].each) for name in ("memory_bytes", "bytes") if name in parts}
        log.tell(began=ckpt.step, source=source, digest=digest_of(state), skipped=skipped, each=each)
        for step in range(ckpt.step, steps) if own_loop else ckpt.steps(steps):
            drawn = layout.advance(state, step + 1, rank, ranks)
            log.tell(step=step + 1, digest=digest_of(state), drawn=drawn)
            if on_step is not None:
                on_step(ckpt, rank, step + 1)
            beside.completed(step + 1)
            if end.step == step:
                if end.settled:
                    settle(ckpt, step)
                os.kill(os.getpid(), signal.SIGKILL)
            if own_loop:
                ckpt.step_done(step + 1)


def settle(ckpt: Any, step: int) -> None:
    """Returns when all ranks are known to have `step` in memory, and a save of it, if there is one, has ended."""
    saving = ckpt._training.saving
    assert saving.memory._saver.join(30)
    assert saving.memory.tier._common.step.settle(30) == step
    assert saving.saver.join(30)


def live(
    where: Path,
    ranks: int = 2,
    *,
    steps: int = 20,
    ends: dict[int, Ends] | None = None,
    roots: Sequence[Path] | None = None,
    before: Callable[[int], None] | None = None,
    **options: Any,
) -> list[Life]:
    """Trains in a process for each rank. Once one is killed all are, as the launcher of a job does. `roots`: the shared
    memory of each rank's node, where they are on several."""
    name = os.urandom(6).hex()
    logs = [where.parent / f"log-{name}-{rank}.jsonl" for rank in range(ranks)]
    pids = []
    for rank in range(ranks):

        def body(rank: int = rank) -> None:
            end = (ends or {}).get(rank, Ends())
            with ExitStack() as stack:
                if roots is not None:
                    stack.enter_context(mock.patch.object(slots, "SHARED_MEMORY", str(roots[rank])))
                if end.at:
                    stack.enter_context(armed(end.at, (lambda: os._exit(3)) if end.alone else Kill(end.count)))
                if before is not None:
                    before(rank)
                train(where, Log(logs[rank]), steps, rank, ranks, where.parent / f"pace-{name}", end, **options)

        pids.append(fork_off(body))
    statuses = _ended(pids)
    return [read(log, statuses[pid]) for log, pid in zip(logs, pids, strict=True)]


def _ended(pids: Sequence[int]) -> dict[int, int]:
    """The exit status of each; the first that is killed takes the others with it."""
    found: dict[int, int] = {}
    until = time.monotonic() + 120
    while len(found) < len(pids):
        for pid in pids:
            if pid in found:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                found[pid] = os.waitstatus_to_exitcode(status)
        if -signal.SIGKILL in found.values() or time.monotonic() > until:
            for pid in pids:
                if pid not in found:
                    os.kill(pid, signal.SIGKILL)
                    found[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(0.002)
    assert time.monotonic() < until, "the ranks hang"
    return found
