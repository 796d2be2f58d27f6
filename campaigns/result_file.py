"""Shared by campaigns and benchmarks: options, the header of a result, and progress lines.

A result counts only with its origin: the command, the seed, the time it took, the code, the versions and the machine.
`ResultHeader` records these when a campaign begins, so that no campaign can leave one out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

SAY_EVERY_S: Final = 10.0
"""Where nobody watches a terminal, a line so often."""
_OF_A_HOOK: Final = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")


def versions(*packages: str) -> dict[str, str]:
    """Of Python and of these packages, as they are installed; "absent" where one is not."""
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def machine() -> dict[str, Any]:
    """The hardware and the kernel, and what else it is busy with now."""
    memory = _first("/proc/meminfo", "MemTotal").split()[0]
    return {
        "cpu": _first("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory) / (1 << 20), 1) if memory.isdigit() else "unknown",
        "kernel": platform.release(),
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def code(*beside: Path) -> dict[str, Any]:
    """The commit that this package runs from, and whether any of its files, or of those `beside` it, differs from what
    was committed. Nothing where the package lies in no git checkout of its own: one that is installed within the
    checkout of something else has no commit."""
    here = Path(__file__).resolve()
    if _git(here, "ls-files", "--error-unmatch", here.name) is None:
        return {}
    commit = _git(here, "rev-parse", "--short", "HEAD")
    root = here.parents[1]
    changed = _git(here, "status", "--porcelain", "--", str(root / "src"), str(here.parent), *map(str, beside))
    return {} if commit is None or changed is None else {"commit": commit, "dirty": bool(changed)}


def options(
    module: str, description: str | None, *, seed: int = 1, workers: int | None = None, bugs: bool = False
) -> argparse.ArgumentParser:
    """A parser with the options that campaigns share; what is counted is the campaign's own.

    workers: the default of `--workers`, None for a campaign that runs in one process. bugs: whether it seeds bugs.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--seed", type=int, default=seed)
    if workers is not None:
        parser.add_argument("--workers", type=int, default=workers, help="processes at a time")
    if bugs:
        parser.add_argument("--no-bugs", action="store_true", help="seed no bugs")
    parser.add_argument("--json", type=Path, help="where to write the result")
    return parser


class ResultHeader:
    """One run of a campaign, from now on."""

    def __init__(
        self, module: str, arguments: Sequence[str] | None, *, seed: int | None, packages: Sequence[str] = ()
    ) -> None:
        """arguments: as given to the campaign's `main`; None: the process's own. packages: besides tenuto."""
        words = sys.argv[1:] if arguments is None else arguments
        self._head = {"command": shlex.join(["python", "-m", module, *words]), "seed": seed}
        self._code = code()
        self._versions = versions("tenuto", *packages)
        self._machine = machine()
        self._began = time.monotonic()

    def result(self, counts: Mapping[str, Any]) -> dict[str, Any]:
        """The head, and below it what was counted."""
        seconds = {"seconds": round(time.monotonic() - self._began, 1)}
        made_by = {**self._code, "versions": self._versions, "machine": self._machine}
        return {**self._head, **seconds, **made_by, **counts}


def deliver(result: Mapping[str, Any], path: Path | None, text: str | None = None) -> None:
    """Writes the result as JSON, if there is a path to write it to; prints `text`, or the same JSON."""
    document = json.dumps(result, indent=2) + "\n"
    if path is not None:
        path.write_text(document, encoding="utf-8")
    sys.stdout.write(document if text is None else text + "\n")


class Progress:
    """Says on stderr how far a campaign is: on a terminal in one line that changes, else a line now and then."""

    def __init__(self) -> None:
        self._said_s: float | None = None

    def __call__(self, line: str) -> None:
        now = time.monotonic()
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{line}")
        elif self._said_s is None or now - self._said_s >= SAY_EVERY_S:
            sys.stderr.write(f"{line}\n")
        else:
            return
        self._said_s = now
        sys.stderr.flush()

    def end(self) -> None:
        """The line that changed stays as it is."""
        if self._said_s is not None and sys.stderr.isatty():
            sys.stderr.write("\n")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _git(of: Path, *words: str) -> str | None:
    """What git says of the checkout in which the file lies; None where there is none, or no git."""
    # Within a hook these say which repository git is to take.
    around = {name: value for name, value in os.environ.items() if name not in _OF_A_HOOK}
    command = ["git", "--no-optional-locks", "-C", str(of.parent), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=around)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _first(path: str, key: str) -> str:
    """What stands behind the colon in the first such line; "unknown" where the system has no such file or line."""
    if not os.path.exists(path):
        return "unknown"
    for line in Path(path).read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(key):
            return line.partition(":")[2].strip() or "unknown"
    return "unknown"
