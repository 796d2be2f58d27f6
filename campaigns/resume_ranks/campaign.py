"""Exact resume on another number of ranks: `python -m campaigns.resume_ranks --json out.json`.

Each training is run whole, on one number of ranks; and again in lives, each job of another number of ranks (or of as
many) after the end that its case names. All processes are forked from one that has imported torch and run none of it,
and form a group over gloo. On as many ranks every step of every rank has to be equal in every bit. On others: what each
rank holds right after the restore is, tensor by tensor, what the job before held when it saved, told by itself; every
step takes the samples that the uninterrupted training took, in the same order; random generators that are alike on all
ranks draw what they would have drawn; and the certificate says what is not the same. Where nothing is random in a step
and no sample comes twice at an epoch's end, the last states are compared too: they agree but for rounding. Controls
break one thing each: each must be told. Exit status 1 if a training is not as it has to be, or a control is.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from campaigns.exact_resume.cases import End
from campaigns.rank_kills.processes import Job, Plan
from campaigns.result_file import Progress, ResultHeader, deliver, options
from campaigns.resume_ranks.cases import CASES, CONTROLS, STEPS, Case
from campaigns.resume_ranks.judge import Life, differences, lives_of
from campaigns.resume_ranks.training import live, read_trails
from tenuto.api.repository import Repository
from tenuto.api.save_load import load
from tenuto.demo.runner import load_framework
from tenuto.maintenance import gc

MODULE: Final = "campaigns.resume_ranks"
PACKAGES: Final = ("numpy", "torch", "torchdata")
PATIENCE_S: Final = 240.0
CLOSE: Final = 1e-4
"""Of what rounding may differ in, relative to the largest number of a tensor."""


@dataclass(frozen=True)
class Outcome:
    """`wrong`: what is not as it has to be, first things first. `tensors`: compared after each restore, on each rank.
    `apart`: by how much the last states differ, relative to the largest number of each tensor; None where steps draw at
    random."""

    name: str
    wrong: tuple[str, ...]
    ended: bool = True
    steps: int = 0
    tensors: int = 0
    apart: float | None = None
    certificate: tuple[str, ...] = ()


def outcome(name: str, place: Path) -> Outcome:
    """Trains whole and in lives, and judges."""
    case = CASES[name] if name in CASES else CONTROLS[name]
    whole, fault = _lives(case, place / "whole", case.worlds[:1], ())
    lives, fault = _lives(case, place / "lives", case.worlds, case.ends) if not fault else ([], fault)
    if fault:
        return Outcome(name, (fault,), ended=False)
    wrong = list(differences(case, whole[0], lives))
    apart = None
    if case.repeats and not wrong:
        apart = _apart(place / "whole", place / "lives")
        wrong += [f"the last states differ by {apart:.3g}"] if apart > CLOSE else []
    began = [line for life in lives for line in life.began]
    said = dict.fromkeys(
        one for line in began for one in line["certificate"]["reasons"] + line["certificate"]["caveats"]
    )
    return Outcome(
        name,
        tuple(wrong),
        steps=sum(len(life.steps) for life in lives),
        tensors=sum(len(line["digests"]) for line in began),
        apart=apart,
        certificate=tuple(said),
    )


def _lives(case: Case, place: Path, worlds: Sequence[int], ends: Sequence[End]) -> tuple[list[Life], str]:
    """What the jobs of all lives have noted, and what went wrong with one."""
    for life, world in enumerate(worlds):
        end = ends[life] if life < len(ends) else None
        if life and case.repacked:
            repository = Repository(place / "checkpoints")
            repository.repack(encoding="small" if life == 1 else "plain")
            gc.execute(repository.repo, gc.plan_gc(repository.repo, now=True))
        plan = Plan(place, world, STEPS, timeout_s=60.0, more={"case": case, "end": end, "life": life})
        with Job(plan, live) as job:
            job.wait(PATIENCE_S)
            wanted = -9 if end is not None and end.how == "killed" else 0
            if {rank: one.status for rank, one in job.ended.items()} != dict.fromkeys(range(world), wanted):
                logs = (place / f"rank-{rank}.log" for rank in range(world))
                tails = "; ".join(log.read_text(errors="replace")[-500:] for log in logs if log.exists())
                return [], f"life {life} of {world} ranks, to be {end or 'left alone'}, ended with {job.ended}: {tails}"
    return lives_of(read_trails(place, max(worlds)), worlds), ""


def _apart(one: Path, other: Path) -> float:
    """The largest difference of the last checkpoints' tensors, relative to the largest number of each."""
    states = [load(place / "checkpoints").state for place in (one, other)]
    pairs = zip(_tensors(states[0]), _tensors(states[1]), strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-8)) for a, b in pairs)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value.double()] if value.numel() else []
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for one in inside for tensor in _tensors(one)]


def campaign(names: Sequence[str], *, log: Callable[[str], None]) -> list[Outcome]:
    """The outcomes in the order of the names, one after the other: nothing else may run in what is forked from."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="tenuto-resume-", dir=memory) as top:
        for number, name in enumerate(names):
            found.append(outcome(name, Path(top) / str(number)))
            log(f"{len(found)} of {len(names)}: {name}: {next(iter(found[-1].wrong), 'as it has to be')}")
    return found


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The counts, and a line for each case."""
    cases = [one for one in outcomes if one.name in CASES]
    controls = [one for one in outcomes if one.name in CONTROLS]
    return {
        "cases": len(cases),
        "as_they_have_to_be": sum(not one.wrong for one in cases),
        "on_as_many_ranks_bit_for_bit": sum(not one.wrong and CASES[one.name].same_ranks for one in cases),
        "on_other_ranks": sum(not one.wrong and not CASES[one.name].same_ranks for one in cases),
        "resumes": sum(len(CASES[one.name].ends) for one in cases),
        "steps_with_the_samples_of_the_uninterrupted_training": sum(one.steps for one in cases if not one.wrong),
        "tensors_equal_after_a_restore": sum(one.tensors for one in cases if not one.wrong),
        "controls": len(controls),
        "controls_told": sum(was_noticed(one) for one in controls),
        "outcomes": [_described(one) for one in (*cases, *controls)],
    }


def was_noticed(control: Outcome) -> bool:
    """Whether the judge saw what is wrong: all jobs came to their ends, and something is not as it has to be."""
    return control.ended and bool(control.wrong)


def _described(one: Outcome) -> dict[str, Any]:
    case = CASES[one.name] if one.name in CASES else CONTROLS[one.name]
    return {
        "name": one.name,
        "control": one.name in CONTROLS,
        **case.kinds,
        "result": next(iter(one.wrong), "as it has to be"),
        "steps": one.steps,
        "tensors": one.tensors,
        **({} if one.apart is None else {"last_states_apart_by": float(f"{one.apart:.3g}")}),
        "certificate_says": list(one.certificate),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = options(MODULE, __doc__)
    parser.add_argument("--cases", nargs="*", choices=[*CASES, *CONTROLS], metavar="NAME", help="these alone")
    given = parser.parse_args(arguments)
    result_header, log = ResultHeader(MODULE, arguments, seed=None, packages=PACKAGES), Progress()
    load_framework()
    importlib.import_module("torchdata.stateful_dataloader")
    outcomes = campaign(given.cases or [*CASES, *CONTROLS], log=log)
    log.end()
    report = result_header.result(summary(outcomes))
    deliver(report, given.json)
    return 0 if report["as_they_have_to_be"] == report["cases"] and report["controls_told"] == report["controls"] else 1


if __name__ == "__main__":
    sys.exit(main())
