"""Every training of one of `certify_scripts`, certified: `certify_cases.py SCRIPT` prints what was found, as JSON.

The scripts are forked from this process, which has imported what they need and run none of it: four starts of Python,
and of torch, for each of them would take minutes.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tenuto.certify.runner import Certifier
from tenuto.demo.runner import load_framework
from tenuto.errors import TenutoError

sys.path.insert(0, str(Path(__file__).with_name("certify_scripts")))
STEPS, MORE = 3, 6
PATIENCE_S = {"hangs": 1.0}


class Forked:
    """A script that runs in a forked child, in a session of its own."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(self._run(command, environment, log))

    def _run(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """The child's exit status."""
        os.setsid()
        os.environ.update(environment)
        with log.open("ab") as output, open(os.devnull, "rb") as nothing:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os.dup2(nothing.fileno(), 0)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        script, name, where = command
        try:
            getattr(__import__(script), name)(where)
        except SystemExit as leaving:
            return int(leaving.code or 0)
        except BaseException:  # noqa: BLE001 - a forked child must not return into its parent's program
            traceback.print_exc()
            return 1
        finally:
            sys.stdout.flush()
        return 0

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        while self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def outcome(script: str, name: str, place: Path) -> dict[str, Any]:
    where = place / "ckpts"
    scratch = place / "scratch"
    scratch.mkdir(parents=True)
    command = [script, name, str(where)]
    certifier = Certifier(str(where), command, scratch, STEPS, MORE, PATIENCE_S.get(name, 120), launch=Forked)
    try:
        found = certifier.run()
    except TenutoError as error:
        told = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
        return {**told, "touched": where.exists()}
    difference, cause = found.verdict.difference, found.verdict.cause
    return {
        "kind": found.verdict.kind,
        "cause": cause.name if cause else None,
        "advice": cause.advice if cause else None,
        "step": difference.step if difference else None,
        "first": difference.first.path if difference else None,
        "groups": sorted(difference.found) if difference else None,
        "saved": found.saved,
        "last": found.last,
        "unseeded": found.verdict.unseeded,
        "uncovered": found.uncovered,
        "unlogged": found.unlogged,
        "lives": [(life.began, life.reached, life.killed) for life in found.runs],
        "touched": where.exists(),
    }


def main() -> None:
    script = sys.argv[1]
    if script == "torch_training":
        import torch

        torch.set_num_threads(1)
        load_framework()
    cases = importlib.import_module(script).CASES
    # In memory where that is possible: nothing here is about a disk, and every save waits for it.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="tenuto-certify-cases-", dir=memory) as place:
        found = {f"{script}.{name}": outcome(script, name, Path(place) / name) for name in cases}
    json.dump(found, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
