"""A small training with a memory tier, in forked processes that can be killed at any named point."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import tenuto
from tenuto import every, on
from tenuto.crashpoints import armed
from tenuto.engine.staging import slots

ELEMENTS = 30_000


@contextmanager
def shared_memory() -> Iterator[Path]:
    """A directory of its own on the real shared memory."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tenuto-test-", dir="/dev/shm")))
        stack.enter_context(mock.patch.object(slots, "SHARED_MEMORY", str(root)))
        yield root


@dataclass
class Life:
    """What one process did: its exit status, the step it began from, where that came from, its steps' digests and its
    events by name."""

    status: int
    began: int = 0
    source: str = ""
    skipped: list[int] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    """Of several ranks: the bytes that each had in memory of what was read from the store."""
    nbytes: list[float] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    drawn: dict[int, float] = field(default_factory=dict)
    """What its random generator drew at each step, where it says so."""
    events: list[tuple[str, str]] = field(default_factory=list)

    @property
    def killed(self) -> bool:
        return self.status == -signal.SIGKILL

    def told(self, name: str) -> list[str]:
        return [text for event, text in self.events if event == name]


class Log:
    """Events and steps, one JSON line each, as soon as they happen."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def emit(self, event: tenuto.Event) -> None:
        found = (getattr(event, name, None) for name in ("message", "error", "reason", "id"))
        text = str(next(filter(None, found), ""))
        self.tell(event=type(event).__name__, text=text)

    def tell(self, **what: Any) -> None:
        self._file.write(json.dumps(what) + "\n")


def state_of(elements: int = ELEMENTS) -> dict[str, Any]:
    return {"model": {"w": np.zeros(elements, np.float32), "b": np.zeros(7)}, "history": [0.0]}


def advance(state: dict[str, Any]) -> None:
    """One step: draws from a generator that every save captures."""
    model = state["model"]
    model["w"] += np.random.standard_normal(len(model["w"])).astype(np.float32)
    model["b"] *= 0.5
    model["b"] += model["w"][:7]
    state["history"][0] = float(model["b"].sum())


def digest_of(state: dict[str, Any]) -> str:
    found = hashlib.sha256(state["model"]["w"].tobytes() + state["model"]["b"].tobytes())
    return hashlib.sha256(found.digest() + repr(state["history"]).encode()).hexdigest()


OnStep = Callable[[Any, int, dict[str, Any]], None]


def train(
    where: Path, log: Log, steps: int, on_step: Callable[[Any, int, dict[str, Any]], None], **options: Any
) -> None:
    np.random.seed(5)
    elements = options.pop("elements", ELEMENTS)
    state = state_of(elements)
    options = {"save": every(steps=10) | on.end(), "memory": every(steps=1), **options}
    with tenuto.Checkpointer(where, state, sinks=[log], **options) as ckpt:
        found = ckpt.restore()
        skipped = [id.step for id, _ in found.skipped] if found is not None else []
        source = found.source if found is not None else ""
        log.tell(began=ckpt.step, source=source, digest=digest_of(state), skipped=skipped)
        for step in ckpt.steps(steps):
            advance(state)
            log.tell(step=step + 1, digest=digest_of(state))
            on_step(ckpt, step + 1, state)


def sealed(ckpt: Any) -> None:
    """Returns when the state that was taken last is sealed."""
    assert ckpt._training.saving.memory._saver.join(30)


class Kill:
    """Ends the process by SIGKILL the `count`-th time it is called."""

    def __init__(self, count: int = 1) -> None:
        self.left = count

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()


def live(
    where: Path,
    steps: int = 40,
    *,
    kill: int | None = None,
    at: str | None = None,
    count: int = 1,
    before: Callable[[], None] | None = None,
    on_step: OnStep | None = None,
    **options: Any,
) -> Life:
    """Trains in a process of its own: killed once step `kill` is done, and what it saves and keeps in memory is there,
    or the `count`-th time that it comes to the crash point `at`."""
    log = where.parent / f"log-{os.urandom(6).hex()}.jsonl"

    def each(ckpt: Any, step: int, state: dict[str, Any]) -> None:
        if on_step is not None:
            on_step(ckpt, step, state)

    def body() -> None:
        with ExitStack() as stack:
            if at is not None:
                stack.enter_context(armed(at, Kill(count)))
            if before is not None:
                before()
            if kill is not None:
                from tenuto.training import training_session

                inner = training_session.TrainingSession.complete_step

                def complete(self: Any, **more: Any) -> None:
                    inner(self, **more)
                    if self.step == kill:
                        assert self.saving.saver.join(30)
                        if self.saving.memory is not None:
                            assert self.saving.memory._saver.join(30)
                        os.kill(os.getpid(), signal.SIGKILL)

                stack.enter_context(mock.patch.object(training_session.TrainingSession, "complete_step", complete))
            train(where, Log(log), steps, each, **options)

    return read(log, fork(body))


def fork(body: Callable[[], None]) -> int:
    """The exit status of a forked child that ran `body`."""
    return os.waitstatus_to_exitcode(os.waitpid(fork_off(body), 0)[1])


def fork_off(body: Callable[[], None]) -> int:
    """The pid of a forked child that runs `body`."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        body()
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the child must never go on as a second test run
        traceback.print_exc()
        os._exit(1)


def read(log: Path, status: int) -> Life:
    life = Life(status)
    for line in log.read_text().splitlines() if log.exists() else ():
        found = json.loads(line)
        if "event" in found:
            life.events.append((found["event"], found["text"]))
        elif "began" in found:
            life.began, life.source, life.skipped = found["began"], found["source"], found["skipped"]
            life.digests[life.began] = found["digest"]
            each = found.get("each", {})
            life.memory, life.nbytes = each.get("memory_bytes", []), each.get("bytes", [])
        else:
            life.digests[found["step"]] = found["digest"]
            if "drawn" in found:
                life.drawn[found["step"]] = found["drawn"]
    return life


@functools.cache
def untouched(steps: int = 40, elements: int = ELEMENTS) -> dict[int, str]:
    """The digest of every step of a training that nobody kills."""
    before = np.random.get_state()
    try:
        np.random.seed(5)
        state = state_of(elements)
        found = {0: digest_of(state)}
        for step in range(1, steps + 1):
            advance(state)
            found[step] = digest_of(state)
        return found
    finally:
        np.random.set_state(before)


def right(*lives: Life) -> None:
    """Asserts that every step of every life is bit for bit what an untouched training has there."""
    expected = untouched()
    for life in lives:
        assert life.digests, "it told of no step"
        assert {step: digest for step, digest in life.digests.items() if digest != expected[step]} == {}
