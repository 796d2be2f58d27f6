"""Many cells side by side: they mostly wait."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final
from unittest import mock

from campaigns.rank_phases.cells import Cell, Outcome, begun, cells, judge
from campaigns.rank_phases.deadlines import TIMEOUT_S
from campaigns.rank_phases.old_job import Cut, cuts, judge_cut
from tenuto.repo.ownership import claim

DYING_S: Final = 0.5
"""A coordinator that is stopped still owns the run; it is claimed over after so long."""


def play(what: Sequence[Cell | Cut], place: Path, *, at_once: int) -> Iterator[Outcome]:
    """What came of each, in that order. The job that follows has one rank, two and three in turn."""
    with mock.patch.object(claim, "DYING_S", DYING_S):
        start = begun(place / "begun")
        with ProcessPoolExecutor(at_once, mp_context=multiprocessing.get_context("fork")) as pool:
            tasks = [(cell, start, place / str(number), 1 + number % 3) for number, cell in enumerate(what)]
            yield from pool.map(_one, tasks)


def _one(task: tuple[Cell | Cut, Path, Path, int]) -> Outcome:
    cell, start, here, world = task
    try:
        return judge(cell, start, here, world) if isinstance(cell, Cell) else judge_cut(cell, start, here, world)
    except Exception as error:  # noqa: BLE001 - a cell that cannot be played is a fault of it
        return Outcome(cell, (f"could not be played: {error!r}",))


def everything() -> list[Cell | Cut]:
    return [*cells(), *cuts()]


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The counts, as they are written to the JSON file."""
    struck = [one for one in outcomes if isinstance(one.cell, Cell)]
    returned = [one for one in outcomes if isinstance(one.cell, Cut)]
    return {
        "cells": len(struck),
        "cells_without_a_fault": sum(not one.faults for one in struck),
        "by_victim": _by(struck, lambda cell: cell.who),
        "by_phase": _by(struck, lambda cell: cell.phase),
        "by_how": _by(struck, lambda cell: cell.how),
        "ranks_timeout_s": TIMEOUT_S,
        "waits": waits(struck),
        "old_jobs_that_came_back": len(returned),
        "old_jobs_that_changed_nothing": sum(not one.faults for one in returned),
        "faults": [f"{one.cell}: {fault}" for one in outcomes for fault in one.faults],
        "said": {str(one.cell): list(one.errors_behind) for one in outcomes},
        "times": {str(one.cell): one.times.json() for one in struck if one.times is not None},
    }


def waits(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """For each cell in which somebody lost something: what is promised, and the slowest of the other ranks, from the
    strike until it raised, and until it had left."""
    rows = []
    for one in outcomes:
        if not isinstance(one.cell, Cell) or one.times is None or not one.times.raised_s:
            continue
        slowest = {
            "raised_s": round(max(one.times.raised_s.values()), 1),
            "left_s": round(max(one.times.left_s.values()), 1),
        }
        promised_s = one.times.promise.raised_s
        rows.append(
            {"phase": one.cell.phase, "who": one.cell.who, "how": one.cell.how, "promised_s": promised_s} | slowest
        )
    return rows


def _by(outcomes: Sequence[Outcome], name: Callable[[Any], str]) -> dict[str, str]:
    """For each the cells without a fault, of all."""
    found: dict[str, list[bool]] = {}
    for one in outcomes:
        found.setdefault(name(one.cell), []).append(not one.faults)
    return {key: f"{sum(good)} of {len(good)}" for key, good in found.items()}
