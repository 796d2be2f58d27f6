"""Kills trainings under `tenuto run`, and the supervisor itself: `python -m campaigns.kills --supervised --kills 1000`.

The training is a command of its own, started again by nobody but the supervisor; a supervisor that is killed is started
again by the campaign, at once, as a scheduler would, while the training that it leaves behind still saves. Each round
has to end by itself, with status 0, bit for bit as a training that nobody touched, with no process left.

In one round in four a shell stands between the two, and a scheduler's SIGTERM asks the supervisor to leave as well: it
has to do so with 143, and no step that was completed may be trained again. In another one stderr is full. Each bug of
BUGS, put into the supervisor, is to be found by the rounds that it names (`--seed-bugs`).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Final, Literal

from campaigns.kills.supervised_training import COUNTER
from tenuto.concurrency.process_trees import below, lives
from tenuto.demo.comparison import compare, read
from tenuto.engine.staging import slots
from tenuto.repo.lineage import latest
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

Target = Literal["training", "supervisor", "both", "asked"]
SHARES: Final[dict[Target, int]] = {"training": 8, "supervisor": 1, "both": 1, "asked": 0}
Between = Literal["nothing", "a shell", "a full stderr"]
IN_TURN: Final[tuple[Between, ...]] = ("nothing", "a shell", "nothing", "a full stderr")
SHARES_OF_A_SHELL: Final[dict[Target, int]] = {"training": 4, "supervisor": 2, "both": 1, "asked": 3}
SHELL: Final = ["sh", "-c", '"$@"; exit $?', "sh"]
BUGS: Final[dict[str, tuple[Between, Target, str]]] = {
    "a signal goes to the command alone": (
        "a shell",
        "asked",
        "from tenuto.supervisor.process_tree import ProcessTree as T; "
        "T.signal = lambda self, number, trainings: self._process.send_signal(number)",
    ),
    "nobody holds the lock that trainings wait for": (
        "a shell",
        "supervisor",
        "import tenuto.supervisor.beats_directory as b; b.ALIVE_FILE = 'other'",
    ),
    "a line that cannot be written is an error": (
        "a full stderr",
        "training",
        "import sys; from tenuto import log_lines; "
        "log_lines.put = lambda text: (sys.stderr.write(text), sys.stderr.flush())",
    ),
}
"""By what goes wrong: in which rounds it has to be found, by which of their kills, and Python that brings it about."""
Kind = Literal["numpy", "torch"]
UNTOUCHED: Final = "untouched"
STARTING: Final = 0.2
"""The share of kills that strike between a process's start and its first step."""
TRAINED_S: Final = 0.4
"""A kill comes within so many seconds of training."""
POLL_S: Final = 0.002
LONG: Final = 100_000
"""Steps of a training that is not to come to its end by itself."""
LEFT_S: Final = 30.0
"""A training whose supervisor was killed has left by then."""
LONGEST_S: Final = 120.0
"""Without anything to kill a round is stuck."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What all rounds have in common. `torch_every`: one round in so many trains the GPT, the others a small network
    whose processes start fast; 0: none."""

    per_round: int
    steps: int
    seed: int
    torch_every: int = 0
    between: Between | None = None
    """What all rounds have; None: in turn."""
    bug: str = ""

    def kind(self, number: int) -> Kind:
        return "torch" if self.torch_every and number % self.torch_every == self.torch_every - 1 else "numpy"


@dataclass
class Round:
    """What became of one round. `kills`: by what was killed. `causes`: of the ends that supervisors have noted."""

    number: int
    kind: Kind
    between: Between = "nothing"
    kills: Counter[str] = field(default_factory=Counter)
    starting: int = 0
    supervisors: int = 1
    restarts: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    from_memory: int = 0
    from_store: int = 0
    difference: str | None = None

    def row(self) -> dict[str, Any]:
        return {
            "round": self.number,
            "kind": self.kind,
            "between": self.between,
            "kills": self.kills.total(),
            "killed": dict(self.kills),
            "while_starting": self.starting,
            "equal": self.difference is None,
            "difference": self.difference,
        }


def campaign(*, kills: int, shape: Shape, place: Path, workers: int = 1, seconds: float = 0.0) -> dict[str, Any]:
    """Runs rounds until `kills` are done, or for `seconds` if that is not 0. Children are threads' here, not forks:
    what is killed runs in processes of its own anyway."""
    rounds: list[Round] = []
    began_s = time.monotonic()
    with _shared_memory(place):
        for kind in () if shape.bug else sorted({shape.kind(number) for number in range(max(shape.torch_every, 1))}):
            subprocess.run(_command(place, kind, UNTOUCHED, shape.steps), check=True, capture_output=True)
        with ThreadPool(workers) as pool:
            while sum(one.kills.total() for one in rounds) < kills:
                if seconds and time.monotonic() - began_s > seconds:
                    break
                numbers = range(len(rounds), len(rounds) + workers)
                before = sum(one.kills.total() for one in rounds)
                for one in pool.imap(partial(_round, shape, place), numbers):
                    rounds.append(one)
                    done = sum(one.kills.total() for one in rounds)
                    verdict = one.difference or "equal"
                    print(f"round {len(rounds)}: {done} of {kills} kills, {verdict}", file=sys.stderr, flush=True)
                if done == before:
                    break
    totals: Counter[str] = sum((one.kills for one in rounds), Counter())
    return {
        "kills": totals.total(),
        "kills_of_the_training": totals["training"],
        "kills_of_the_supervisor": totals["supervisor"],
        "kills_of_both_at_once": totals["both"],
        "asked_to_leave": totals["asked"],
        "rounds_with": dict(Counter(one.between for one in rounds)),
        "kills_while_starting": sum(one.starting for one in rounds),
        "supervisors": sum(one.supervisors for one in rounds),
        "restarts_by_a_supervisor": sum(one.restarts for one in rounds),
        "ends_noted": dict(sum((one.causes for one in rounds), Counter())),
        "resumed_from_memory": sum(one.from_memory for one in rounds),
        "resumed_from_the_store": sum(one.from_store for one in rounds),
        "equal": bool(rounds) and all(one.difference is None for one in rounds),
        "rounds": [one.row() for one in rounds],
    }


@contextmanager
def _shared_memory(place: Path) -> Iterator[None]:
    """Gives the trainings a directory of shared memory of their own, gone afterwards."""
    import tempfile

    if not os.access(slots.SHARED_MEMORY, os.W_OK):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="tenuto-supervised-", dir=slots.SHARED_MEMORY) as root:
        (place / "memory").symlink_to(root)
        yield


def _command(place: Path, kind: Kind, run: str, steps: int) -> list[str]:
    return [sys.executable, "-m", "campaigns.kills.supervised_training", str(place), kind, run, str(steps)]


def _round(shape: Shape, place: Path, number: int) -> Round:
    return Rounds(shape, place, number).run()


class Rounds:
    """Runs one round."""

    def __init__(self, shape: Shape, place: Path, number: int) -> None:
        self._shape, self._place = shape, place
        self._found = Round(number, shape.kind(number), shape.between or IN_TURN[number % len(IN_TURN)])
        self._run = f"killed-{number}"
        self._draw = random.Random(f"{shape.seed} {number}")
        self._journal = place / f"{self._run}.journal"
        self._said = place / f"{self._run}.said"
        self._seen: set[int] = set()
        self._start_s = 0.5

    def run(self) -> Round:
        found = self._found
        supervisor = self._start()
        try:
            for _ in range(self._shape.per_round):
                target, early, share = self._target(), self._draw.random() < STARTING, self._draw.random()
                early = early and not self._shape.bug
                training = self._await(supervisor, early, share)
                if training is None:
                    break
                # A supervisor first: one that lives would notice the other's end.
                if target == "asked":
                    found.difference = self._asked(supervisor, early)
                elif target != "training":
                    supervisor.kill()
                if target in ("training", "both"):
                    with suppress(ProcessLookupError):
                        os.kill(training, signal.SIGKILL)
                found.kills[target] += 1
                found.starting += early
                if found.difference is not None:
                    break
                if target != "training":
                    supervisor.wait()
                    supervisor, found.supervisors = self._start(), found.supervisors + 1
                    self._left_behind(training)
            if found.difference is None:
                found.difference = self._difference(supervisor.wait(LONGEST_S))
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            found.difference = f"stuck: {error}"
        finally:
            supervisor.terminate()
            supervisor.wait()
            for pid in self._seen if self._shape.bug else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._account()
        return found

    def _target(self) -> Target:
        if self._shape.bug:
            return BUGS[self._shape.bug][1]
        shares = SHARES_OF_A_SHELL if self._found.between == "a shell" else SHARES
        return self._draw.choices(list(shares), list(shares.values()))[0]

    def _asked(self, supervisor: subprocess.Popen[bytes], early: bool) -> str | None:
        """Asks the supervisor to leave, as a scheduler does; returns what is wrong with how it leaves. One whose
        training comes to its end meanwhile is done."""
        _, before = self._counted()
        supervisor.send_signal(signal.SIGTERM)
        status = supervisor.wait(LONGEST_S)
        if status not in (0, 128 + signal.SIGTERM):
            return f"asked to leave, the supervisor ended with status {status}"
        kept = None if early else latest(Repo.open(open_store(self._place / self._found.kind)), self._run)
        if not early and (kept is None or kept.step < before):
            return f"asked to leave after step {before}, it has saved {kept}"
        return None

    def _left_behind(self, training: int) -> None:
        """Waits until a training without its supervisor has left, as every one has to."""
        until = time.monotonic() + LEFT_S
        while lives(training):
            _tick(until, f"process {training} trains on without its supervisor")

    def _start(self) -> subprocess.Popen[bytes]:
        limits = ["--restarts", "100000", "--per-hour", "100000", "--in-vain", "1000", "--grace", "20s"]
        command = _command(self._place, self._found.kind, self._run, self._shape.steps)
        bug = BUGS[self._shape.bug][2] + "; " if self._shape.bug else ""
        cli = [sys.executable, "-c", f"{bug}from tenuto.cli.application import run; run()"]
        shell = SHELL if self._found.between == "a shell" else []
        with open(self._said, "ab") as said, open("/dev/full", "ab") as full:
            words = [*cli, "run", *limits, "--journal", str(self._journal), "--", *shell, *command]
            errors = full if self._found.between == "a full stderr" else said
            return subprocess.Popen(words, stdout=said, stderr=errors)

    def _await(self, supervisor: subprocess.Popen[bytes], early: bool, share: float) -> int | None:
        """Waits for a process of the training that has not been struck yet, and for the moment; returns it. None once
        the round has ended."""
        until = time.monotonic() + LONGEST_S
        pid = 0
        while supervisor.poll() is None:
            pid = self._newest()
            if pid and pid not in self._seen and lives(pid):
                break
            _tick(until, "no process of the training")
        else:
            return None
        self._seen.add(pid)
        began_s = time.monotonic()
        if early:
            time.sleep(share * self._start_s)
            return pid
        while supervisor.poll() is None and lives(pid):
            who, step = self._counted()
            if who == pid and step:
                self._start_s = time.monotonic() - began_s
                time.sleep(share * TRAINED_S)
                break
            _tick(until, f"process {pid} makes no step")
        return None if supervisor.poll() is not None else pid

    def _newest(self) -> int:
        """Returns the process that trains since the last start, 0 before."""
        started = [one["pid"] for one in self._events() if one["event"] == "started"]
        if not started or self._found.between != "a shell":
            return int(started[-1]) if started else 0
        return next((one.pid for one in below(int(started[-1]))), 0)

    def _counted(self) -> tuple[int, int]:
        with suppress(OSError):
            data = (self._place / f"{self._run}.counter").read_bytes()
            if len(data) == COUNTER.size:
                who, step = COUNTER.unpack(data)
                return who, step
        return 0, 0

    def _events(self) -> list[dict[str, Any]]:
        return _lines(self._journal)

    def _difference(self, status: int) -> str | None:
        if status:
            return f"the supervisor ended with status {status}"
        if left := [pid for pid in self._pids() if lives(pid)]:
            return f"processes {left} are left"
        repo = Repo.open(open_store(self._place / self._found.kind))
        return compare(read(repo, UNTOUCHED), read(repo, self._run)).difference

    def _pids(self) -> set[int]:
        return self._seen | {int(one["pid"]) for one in self._events() if one["event"] == "started"}

    def _account(self) -> None:
        found, events = self._found, self._events()
        found.restarts = sum(one["event"] == "restarting" for one in events)
        found.causes.update(one["kind"] for one in events if one["event"] == "died")
        told = Counter(one["event"] for one in _lines(self._place / f"{self._run}.events"))
        found.from_memory = told["RestoredFromMemory"]
        found.from_store = told["Restored"] - told["RestoredFromMemory"]


def find_bugs(shape: Shape, place: Path) -> list[dict[str, Any]]:
    """Puts in one bug at a time, and runs rounds until it is found; returns what was found of each."""
    found = []
    for number, (bug, (between, _, _)) in enumerate(BUGS.items()):
        (there := place / f"bug-{number}").mkdir()
        result = campaign(kills=1, shape=replace(shape, per_round=1, steps=LONG, between=between, bug=bug), place=there)
        differences = [one["difference"] for one in result["rounds"] if one["difference"]]
        found.append({"bug": bug, "caught": bool(differences), "by": next(iter(differences), None)})
    return found


def _tick(until: float, what: str) -> None:
    if time.monotonic() > until:
        raise TimeoutError(what)
    time.sleep(POLL_S)


def _lines(path: Path) -> list[dict[str, Any]]:
    """Returns what a file of JSON lines has; a line that a kill has cut short is left out."""
    found = []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        with suppress(ValueError):
            found.append(json.loads(line))
    return found
