"""The exact-resume matrix: `python -m campaigns.exact_resume --json out.json`.

Each training is run whole, in one process; and again in pieces, a new process after each end that its case names.
The processes are forked from one that has imported torch and run none of it; those of some cases, with `--fresh` of
all, are interpreters of their own, which takes ten times as long. The last checkpoints of the two are compared in every
bit: weights, optimizer and all other state, the random generators, the position in the data, the counts, and a digest
over every batch and loss on the way. Controls leave out of the state what a resume needs: each must be told. Exit
status 1 if a training differs, or a control does not.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from campaigns.exact_resume.cases import CASES, CONTROLS, Case, End
from campaigns.exact_resume.training import piece
from campaigns.result_file import Progress, ResultHeader, deliver, options
from tenuto.demo.comparison import compare, read
from tenuto.demo.processes import start
from tenuto.demo.runner import load_framework
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

MODULE: Final = "campaigns.exact_resume"
PACKAGES: Final = ("numpy", "torch", "torchdata")
STATUS: Final = {"stopped": 0, "killed": -9, "terminated": 143}
PATIENCE_S: Final = 300.0

Process = Callable[[str, Path, str, End | None], int]
"""Runs one piece: of the named case, in this directory, of this run, to this end. What it prints goes to output.txt."""


@dataclass(frozen=True)
class Outcome:
    """`result`: "equal", or the first difference, or what went wrong. `told`: what the certificate says could make a
    resume inexact."""

    name: str
    result: str
    went_on_from: tuple[int, ...] = ()
    leaves: int = 0
    bytes: int = 0
    told: tuple[str, ...] = ()


def fresh(name: str, place: Path, run: str, end: End | None) -> int:
    """In an interpreter of its own."""
    words = [] if end is None else [str(end.step), end.how]
    command = [sys.executable, "-m", f"{MODULE}.piece", name, str(place / "checkpoints"), run, *words]
    with (place / "output.txt").open("ab") as output:
        return subprocess.run(command, stdout=output, stderr=output, check=False, timeout=PATIENCE_S).returncode


def forked(name: str, place: Path, run: str, end: End | None) -> int:
    """In a child of this process."""

    def work(*_: Any) -> None:
        os._exit(piece(_case(name), place / "checkpoints", run, end))

    child = start(work, place / "events", place / "output.txt")
    child.end()
    assert child.status is not None
    return child.status


def _case(name: str) -> Case:
    return CASES[name] if name in CASES else CONTROLS[name]


def outcome(name: str, place: Path, process: Process | None = None) -> Outcome:
    """Trains whole and in pieces, and compares. process: None for the case's own kind."""
    case = _case(name)
    process = process or (fresh if case.fresh else forked)
    place.mkdir()
    lives: list[tuple[str, End | None]] = [("whole", None), *(("pieces", end) for end in case.ends), ("pieces", None)]
    for run, end in lives:
        status, wanted = process(name, place, run, end), STATUS[end.how] if end is not None else 0
        if status != wanted:
            said = (place / "output.txt").read_text(errors="replace")[-600:]
            return Outcome(name, f"the process to be {end or 'left alone'} ended with status {status}: {said}")
    repo = Repo.open(open_store(place / "checkpoints"))
    whole, pieces = read(repo, "whole"), read(repo, "pieces")
    records = [repo.find_attempt("pieces", number) for number in sorted(repo.attempts("pieces"))]
    parents = [record.parent.step for record in records if record is not None and record.parent is not None]
    wanted_from = [end.goes_on_from for end in case.ends]
    if parents != wanted_from:
        return Outcome(name, f"the pieces resumed from steps {parents}, and not from {wanted_from}")
    certificate: Any = repo.manifest(pieces.id).certificate
    found = compare(whole, pieces)
    told = tuple(str(one) for one in (*certificate["reasons"], *certificate["caveats"]))
    return Outcome(name, found.difference or "equal", tuple(parents), found.leaves, found.bytes, told)


def campaign(names: Sequence[str], process: Process | None, *, log: Callable[[str], None]) -> list[Outcome]:
    """The outcomes in the order of the names, one after the other: nothing else may run in what is forked from."""
    # In memory where that is possible: nothing here is about a disk, and every save is flushed.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="tenuto-exact-", dir=memory) as top:
        for number, name in enumerate(names):
            found.append(outcome(name, Path(top) / str(number), process))
            log(f"{len(found)} of {len(names)}: {name}: {found[-1].result}")
    return found


def summary(outcomes: Sequence[Outcome], *, fresh_all: bool = False) -> dict[str, Any]:
    """The counts, and a line for each case. fresh_all: every process was an interpreter of its own."""
    cases = [one for one in outcomes if one.name in CASES]
    controls = [one for one in outcomes if one.name in CONTROLS]
    return {
        "cases": len(cases),
        "equal": sum(one.result == "equal" for one in cases),
        "processes": sum(len(_case(one.name).ends) + 2 for one in outcomes),
        "resumes": sum(len(_case(one.name).ends) for one in outcomes),
        "controls": len(controls),
        "controls_told": sum(noticed(one) for one in controls),
        "outcomes": [_json(one, fresh_all or _case(one.name).fresh) for one in (*cases, *controls)],
    }


def noticed(control: Outcome) -> bool:
    """Whether the comparison saw the difference: both runs came to their end, and a leaf or a value differs."""
    return control.leaves > 0 and control.result != "equal"


def _json(one: Outcome, own_interpreters: bool) -> dict[str, Any]:
    case = _case(one.name)
    return {
        "name": one.name,
        "control": one.name in CONTROLS,
        **case.kinds,
        "processes": "interpreters of their own" if own_interpreters else "forked before torch has run",
        "ends": [str(end) for end in case.ends],
        "went_on_from": list(one.went_on_from),
        "result": one.result,
        "leaves": one.leaves,
        "bytes": one.bytes,
        **({"certificate_says": list(one.told)} if one.told else {}),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = options(MODULE, __doc__)
    parser.add_argument("--cases", nargs="*", choices=[*CASES, *CONTROLS], metavar="NAME", help="these alone")
    parser.add_argument("--fresh", action="store_true", help="every process is an interpreter of its own")
    given = parser.parse_args(arguments)
    result_header, log = ResultHeader(MODULE, arguments, seed=None, packages=PACKAGES), Progress()
    load_framework()
    importlib.import_module("torchdata.stateful_dataloader")
    names = given.cases or [*CASES, *CONTROLS]
    outcomes = campaign(names, fresh if given.fresh else None, log=log)
    log.end()
    report = result_header.result(summary(outcomes, fresh_all=given.fresh))
    deliver(report, given.json)
    return 0 if report["equal"] == report["cases"] and report["controls_told"] == report["controls"] else 1


if __name__ == "__main__":
    sys.exit(main())
