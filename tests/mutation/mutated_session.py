"""The pytest plugin under which mutants are run: tests are collected once, and each mutant is a fork of that session.

What to do is in the file that MUTATION_WORK names: {"mutants": {name: [test, ...]}, "patience": {test: seconds},
"children": n, "out": path}. `out` gets a line {"mutant": ..., "ended": ...} for each mutant as it ends, in any order. A
mutant without a name is no change at all, with which every test that is named has to pass: else nothing counts.
"""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

SURVIVED, FAILED, TIMED_OUT, UNCLEAR = 0, 1, 36, 70
ENDED = {SURVIVED: "survived", FAILED: "failed", TIMED_OUT: "timed out"}
_POLL_S = 0.005
_screen = os.dup(2)

# That there is a counterexample is all that counts here. To make it small takes longer than to find it.
settings.register_profile("mutated", phases=(Phase.explicit, Phase.generate))
settings.load_profile("mutated")


class Watching:
    """Notes how the tests of one session end."""

    failed = stopped = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed
        self.stopped |= report.failed and "from pytest-timeout" in report.longreprtext


def run_until_one_fails(session: pytest.Session, items: list[pytest.Item], watching: Watching) -> int:
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if watching.failed:
            session._setupstate.teardown_exact(None)
            return TIMED_OUT if watching.stopped else FAILED
    return SURVIVED


def forked(session: pytest.Session, mutant: str, items: list[pytest.Item], watching: Watching) -> int:
    """The process in which these tests run with that mutant ("" for none)."""
    pid = os.fork()
    if pid:
        return pid
    status = UNCLEAR
    try:
        os.environ["MUTANT_UNDER_TEST"] = mutant
        silent = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(silent, descriptor)
        status = run_until_one_fails(session, items, watching)
    except BaseException:  # noqa: BLE001 - what gets past pytest itself has ended the tests
        status = FAILED
    finally:
        os._exit(status)


def ended(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return "crashed" if code < 0 else ENDED.get(code, f"unclear ({code})")


class Running:
    """The forks that run now, at most `children`; those that take longer than their limit are killed."""

    def __init__(self, children: int) -> None:
        self._children = children
        self._since: dict[int, tuple[str, float]] = {}
        self._killed: set[int] = set()

    def add(self, pid: int, mutant: str, limit_s: float) -> None:
        self._since[pid] = mutant, time.monotonic() + limit_s

    def wait(self, *, for_all: bool = False) -> Iterable[tuple[str, str]]:
        """The mutants that have ended, until there is room for another (or none is left)."""
        while self._since and (for_all or len(self._since) >= self._children):
            for pid, (mutant, until) in list(self._since.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    del self._since[pid]
                    yield mutant, "timed out" if pid in self._killed else ended(status)
                elif time.monotonic() > until:
                    self._killed.add(pid)
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)


def say(text: str) -> None:
    os.write(_screen, f"{text}\n".encode())


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Any:
    if "MUTATION_WORK" not in os.environ:
        return None
    work = json.loads(Path(os.environ["MUTATION_WORK"]).read_text())
    known = {item.nodeid: item for item in session.items}
    watching = Watching()
    session.config.pluginmanager.register(watching)
    gc.collect()
    gc.freeze()

    named = {test for tests in work["mutants"].values() for test in tests}
    if not named <= known.keys():
        raise pytest.UsageError(f"not found: {sorted(named - known.keys())[:3]}")
    for name, item in known.items():
        item.add_marker(pytest.mark.timeout(work["patience"].get(name, 0)))
    running = Running(work["children"])
    count = killed = 0
    with open(work["out"], "a", encoding="utf-8") as out:

        def note(mutants: Iterable[tuple[str, str]]) -> None:
            nonlocal count, killed
            for mutant, how in mutants:
                print(json.dumps({"mutant": mutant, "ended": how}), file=out, flush=True)
                count, killed = count + bool(mutant), killed + (how in ("failed", "timed out", "crashed"))
                if count % 50 == 0:
                    say(f"{count} of {len(work['mutants'])} run, {killed} killed")

        running.add(
            forked(session, "", [item for name, item in known.items() if name in named], watching), "", math.inf
        )
        for mutant, tests in work["mutants"].items():
            if not tests:
                note([(mutant, "not reached")])
                continue
            chosen = [known[name] for name in tests]
            # Beside the patience with each: for what pytest-timeout cannot end.
            limit_s = 60 + sum(work["patience"][name] for name in tests)
            running.add(forked(session, mutant, chosen, watching), mutant, limit_s)
            note(running.wait())
        note(running.wait(for_all=True))
    sys.stderr.flush()
    return True
