"""Signals at every line: no wait may be for what cannot come, and nothing that was trained is lost.

`python -m campaigns.signals --json FILE`
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import tenuto
from campaigns.result_file import Progress, ResultHeader, deliver, options
from campaigns.signals.delivery import Delivery, Key, Recorder, Site, Tracer
from campaigns.signals.trainings import TRAININGS, Report, Training, by_name, state
from tenuto import on
from tenuto.errors import TenutoError
from tenuto.maintenance.verify import assert_whole

PATIENCE_S: Final = 30
"""After which a process hangs: the longest wait of a training here is milliseconds."""
HANGS: Final = 99
RAISED: Final = 7


@dataclass(frozen=True)
class Mode:
    """How the process is asked to leave. `statuses`: what it may leave with."""

    name: str
    numbers: tuple[int, ...]
    catches: bool
    statuses: tuple[int, ...]
    returns: bool = False
    """Also where a function returns: what is raised there is raised with what it has taken."""


TERM, INT, OWN = signal.SIGTERM, signal.SIGINT, signal.SIGUSR2
MODES: Final = (
    Mode("terminate", (TERM,), True, (128 + TERM, -TERM)),
    Mode("interrupt twice", (INT, INT), True, (128 + INT,), returns=True),
    Mode("interrupt", (INT,), False, (128 + INT,), returns=True),
    Mode("handler of one's own", (OWN,), True, (RAISED,)),
)


@dataclass(frozen=True)
class Case:
    training: str
    mode: str
    site: Site

    def __str__(self) -> str:
        return f"{self.training}, {self.mode}, {self.site}"


def mode_of(name: str) -> Mode:
    return next(one for one in MODES if one.name == name)


# -- one process ---------------------------------------------------------------------------------------------------


def leave(number: int, frame: Any) -> None:
    raise SystemExit(RAISED)


def training_process(case: tuple[Training, Mode], place: Path, report: Report, came: Callable[[Key], None]) -> int:
    """Runs the training in this process, which was forked for it; its exit status, as a shell sees it."""
    training, mode = case
    with open(place / "log", "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    faulthandler.dump_traceback_later(PATIENCE_S, file=2)
    warnings.simplefilter("ignore")
    signal.signal(OWN, leave)
    if isinstance(came, Delivery):
        came.watch()
    status = 0
    try:
        Tracer(came).start()
        training.run(place / "run", report, on.signal() if mode.catches else None)
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 1
    except KeyboardInterrupt:
        status = -INT
    except BaseException:  # noqa: BLE001 - as an interpreter does
        traceback.print_exc()
        status = 1
    return status


def in_child(work: Callable[[], int]) -> int:
    """Runs `work` in a forked process to its end, exit hooks included; how it ended, `HANGS` where it does not."""
    pid = os.fork()
    if pid:
        return _status(pid)
    status = 1
    try:
        status = work()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 1
    except KeyboardInterrupt:
        status = -INT
    except BaseException:  # noqa: BLE001 - told by the status
        traceback.print_exc()
    finally:
        sys.settrace(None)
        sys.stderr.flush()
        os._exit(128 + INT if status == -INT else status)


def _status(pid: int) -> int:
    alarm = threading.Timer(PATIENCE_S + 2, os.kill, (pid, signal.SIGKILL))
    alarm.start()
    try:
        _, code = os.waitpid(pid, 0)
    finally:
        alarm.cancel()
        alarm.join()
    found = os.waitstatus_to_exitcode(code)
    return HANGS if found == -signal.SIGKILL else found


def _goes_on(training: Training, where: Path) -> None:
    """What a notebook does after an interrupt: another Checkpointer in the same process, which takes the run over."""
    one = state()
    more: dict[str, Any] = {"memory": tenuto.every(steps=1)} if "memory" in training.name else {}
    if training.name == "fenced":
        return  # its state has a model too
    with tenuto.Checkpointer(where, one, **more) as ckpt:
        ckpt.restore()
        one["w"] += 1
        one["n"] += 1
        ckpt.step_done()
        ckpt.save(wait=True)


def _before(where: Path, training: Training) -> int:
    """Two steps, saved and left as by a process that was killed."""
    one, memory = state(), "memory" in training.name
    more: dict[str, Any] = {"memory": tenuto.every(steps=1)} if memory else {}
    ckpt = tenuto.Checkpointer(where, one, save=tenuto.every(steps=1 + memory), **more)
    ckpt.restore()
    for _ in range(3):
        one["w"] += 1
        one["n"] += 1
        ckpt.step_done()
    ckpt._training.saving.wait(30)  # type: ignore[union-attr]
    if memory:
        ckpt._training.saving.memory._saver.join(30)  # type: ignore[union-attr]
    os._exit(0)


@contextmanager
def _place() -> Iterator[Path]:
    """A directory that a forked process does not remove at its own end."""
    place = Path(tempfile.mkdtemp(prefix="tenuto-signals-"))
    try:
        yield place
    finally:
        shutil.rmtree(place)


# -- one case ------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    case: Case
    faults: tuple[str, ...]
    status: int = 0
    watched: bool = False
    delivered: bool = False
    """Whether the training came to the line: the order of its threads is not always the same."""


def play(case: Case) -> Outcome:
    """Delivers one signal, and judges how the process ended and what it left."""
    training, mode = by_name(case.training), mode_of(case.mode)
    report = Report()
    with _place() as place:
        where, log, told = place / "run", place / "log", place / "judged"
        if training.resumes:
            in_child(lambda: _before(where, training))

        def work() -> int:
            status = training_process((training, mode), place, report, Delivery(case.site, mode.numbers, report))
            sys.settrace(None)
            threading.settrace(None)
            if status == -INT:
                _goes_on(training, where)
            return status

        status = in_child(work)
        in_child(lambda: _judge(where, training, told))
        faults = list(_faults(mode, status, report, json.loads(told.read_text()) if told.exists() else None))
        if faults and log.exists():
            faults.append(log.read_text()[-6000:])
        watched, delivered = bool(report["watched_then"]), bool(report["delivered"])
        outcome = Outcome(case, tuple(faults), status, watched, delivered)
    report.close()
    return outcome


def _judge(where: Path, training: Training, told: Path) -> int:
    """Writes what lies there: the newest checkpoint, and what is wrong with any; and lets another process go on."""
    faults: list[str] = []
    newest = None
    try:
        if (where / "tenuto.json").exists():
            repository = tenuto.Repository(where)
            assert_whole(repository.repo)
            for id in repository.checkpoints("main"):
                saved = tenuto.load(where, step=id.step)
                if not saved.state["n"] == saved.state["w"][0] == saved.state["w"][-1] == saved.step:
                    faults.append(f"step {saved.step} holds {saved.state['n']} and {saved.state['w'][0]:g}")
                newest = max(saved.step, newest or 0)
        if training.name != "fenced":
            _goes_on(training, where)
            tenuto.Repository(where)
    except (TenutoError, AssertionError) as error:
        faults.append(f"{type(error).__name__}: {error}")
    told.write_text(json.dumps({"newest": newest, "faults": faults}))
    return 0


def _faults(mode: Mode, status: int, report: Report, judged: dict[str, Any] | None) -> Iterator[str]:
    if not report["delivered"]:
        if status != 0:
            yield f"ended with {status} before the signal was delivered"
        return
    if status == HANGS:
        yield "hangs"
    elif status not in mode.statuses:
        yield f"left with status {status}"
    if report["begun"] > report["begun_then"] + 1:
        yield f"trained on for {report['begun'] - report['begun_then']} steps"
    if judged is None:
        yield "what it left could not be judged"
        return
    yield from judged["faults"]
    if mode.name == "terminate" and report["watched_then"] and status == 128 + TERM:
        saved = judged["newest"] or 0
        if saved != report["counted"] or saved < report["done_then"]:
            yield f"the newest checkpoint is step {saved} of {report['counted']} counted, {report['done_then']} done"


# -- all of them ---------------------------------------------------------------------------------------------------


def sites(training: Training) -> list[tuple[Site, int]]:
    """The lines that a training comes to where no signal comes, with how often."""
    report = Report()
    with _place() as place:
        told = place / "sites"
        if training.resumes:
            in_child(lambda: _before(place / "run", training))
        recorder = Recorder()

        def work() -> int:
            status = training_process((training, MODES[0]), place, report, recorder)
            sys.settrace(None)
            told.write_text(json.dumps([[*key, count] for key, count in recorder.counts.items()]))
            return status

        status = in_child(work)
        assert status == 0, f"{training.name} ends with {status}: {(place / 'log').read_text()}"
        found = json.loads(told.read_text())
    report.close()
    return [(Site(writer, file, line, event), count) for writer, file, line, event, count in found]


NEAR: Final = (
    "training/",
    "engine/save/",
    "engine/staging/p",
    "engine/fence/",
    "engine/memory_tier/",
    "concurrency/",
    "state/update_barrier",
    "threading.py",
)
"""Where threads wait for each other; of what only computes, a tenth is swept."""


def cases(seed: int, number: int | None = None, names: Sequence[str] = ()) -> list[Case]:
    """The cases: each line, at the first time and at the last time that it is reached; `number` of them, drawn."""
    source = random.Random(seed)
    found = []
    for training in TRAININGS:
        if names and training.name not in names:
            continue
        reached = sites(training)
        for mode in MODES:
            for site, count in reached:
                if site.event == "return" and (site.writer or not mode.returns):
                    continue
                if site.file.startswith(NEAR) or source.random() < 0.1:
                    numbers = sorted({1, count})
                    found += [Case(training.name, mode.name, replace(site, count=one)) for one in numbers]
    source.shuffle(found)
    return found[:number]


def sweep(what: Sequence[Case], workers: int) -> Iterator[Outcome]:
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(play, what, chunksize=1)


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    def by(key: Callable[[Outcome], str]) -> dict[str, str]:
        total, good = Counter(map(key, outcomes)), Counter(key(one) for one in outcomes if not one.faults)
        return {name: f"{good[name]} of {count}" for name, count in total.items()}

    return {
        "cases": len(outcomes),
        "cases_without_a_fault": sum(not one.faults for one in outcomes),
        "signals_delivered": sum(one.delivered for one in outcomes),
        "while_signals_were_watched": sum(one.watched for one in outcomes),
        "by_training": by(lambda one: one.case.training),
        "by_mode": by(lambda one: one.case.mode),
        "by_thread": by(lambda one: "writer" if one.case.site.writer else "training"),
        "lines": len({(one.case.site.file, one.case.site.line) for one in outcomes}),
        "faults": {str(one.case): list(one.faults) for one in outcomes if one.faults},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    from campaigns.signals.bugs import run_bugs

    parser = options("campaigns.signals", "Signals at every line of a save's way.", workers=2, bugs=True)
    parser.add_argument("--cases", type=int, help="how many are played; all, unless given")
    parser.add_argument("--trainings", nargs="*", default=[], help="only these")
    chosen = parser.parse_args(arguments)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background job of a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)
    header = ResultHeader("campaigns.signals", arguments, seed=chosen.seed, packages=("torch",))
    if "fenced" in (chosen.trainings or ["fenced"]):  # loaded once here, and not in each forked process
        import torch

        torch.set_num_threads(1)
        torch.compiler.assume_constant_result(main)  # type: ignore[no-untyped-call]
    bugs = [] if chosen.no_bugs else run_bugs(chosen.seed)
    log, outcomes = Progress(), []
    what = cases(chosen.seed, chosen.cases, chosen.trainings)
    for outcome in sweep(what, chosen.workers):
        outcomes.append(outcome)
        if outcome.faults:
            sys.stderr.write(f"{outcome.case}: {outcome.faults[0]}\n")
        log(f"{len(outcomes):,} of {len(what):,} cases, {sum(bool(one.faults) for one in outcomes)} with a fault")
    log.end()
    seeded = {"bugs_seeded": len(bugs), "bugs_caught": sum(bug["caught"] for bug in bugs), "bugs": bugs}
    deliver(header.result({**summary(outcomes), **seeded}), chosen.json)
    return 0 if all(not one.faults for one in outcomes) and all(bug["caught"] for bug in bugs) else 1
