"""What of a repository needs a person's attention. Pure: from gathered facts and the time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from tenuto.errors import typed
from tenuto.report.facts import Attention
from tenuto.units import age, count, size

if TYPE_CHECKING:
    from tenuto.report.facts import CheckpointReport, RunReport

VERIFY_WITHIN_S: Final = 7 * 86_400.0
"""A run of which nothing was verified for so long gets a warning."""
LATE: Final = 3.0
"""A save is late when so many times the usual time between two has passed."""
LATE_LEAST_S: Final = 60.0
RECENT: Final = 20
"""A spike or a NaN is worth attention in the newest so many checkpoints."""
_NAMED: Final = 3
ROOM: Final = 3
"""The disk is nearly full where fewer checkpoints than this fit."""


def of_run(run: RunReport, where: str, now_s: float) -> Iterator[Attention]:
    """Yields what a run needs."""
    yield from _damage(run, where)
    yield from _saves(run, where, now_s)
    yield from _verification(run, where, now_s)
    yield from _values(run, where)
    newest = run.newest
    if newest is not None and newest.verdict == "not exact":
        command = typed("tenuto", "show", where, "--run", run.run, "--certificate")
        yield Attention("note", "a resume from the latest is not exact", run.run, command)


def all_clear(runs: Sequence[RunReport]) -> str:
    """Returns what to say where there is nothing: a run of which nothing was ever verified is not vouched for."""
    never = [
        run.run
        for run in runs
        if run.checkpoints and not any(one.checked in ("verified", "proven") for one in run.checkpoints)
    ]
    if not never:
        return "nothing needs attention"
    more = f" and {len(never) - _NAMED} more" if len(never) > _NAMED else ""
    return f"nothing found in what is recorded; nothing was verified yet of {', '.join(never[:_NAMED])}{more}"


def of_repository(runs: Sequence[RunReport], where: str, free: int | None) -> Iterator[Attention]:
    """Yields what the repository as a whole needs."""
    largest = max((one.newest.stored for one in runs if one.newest is not None), default=0)
    if free is not None and largest and free < ROOM * largest:
        text = f"{size(free)} are free: room for {count(free // largest, 'checkpoint')} of {size(largest)}"
        yield Attention("warning", text, "", typed("tenuto", "gc", where, "--dry-run"))


def _damage(run: RunReport, where: str) -> Iterator[Attention]:
    damaged = [one for one in run.checkpoints if one.damaged]
    if not damaged:
        return
    whole = next((one for one in reversed(run.line) if not one.damaged), None)
    verify = typed("tenuto", "verify", where, "--run", run.run)
    if any(one.latest for one in damaged):
        back = f"a resume falls back to step {whole.id.step:,}" if whole else "nothing is left to resume from"
        yield Attention("damage", f"the latest is damaged: {back}", run.run, verify)
    others = [one for one in damaged if not one.latest]
    if others:
        text = f"{count(len(others), 'checkpoint')} {'is' if len(others) == 1 else 'are'} damaged: {_steps(others)}"
        yield Attention("damage", text, run.run, verify)


def _saves(run: RunReport, where: str, now_s: float) -> Iterator[Attention]:
    newest = run.newest
    after = [one for one in run.saves if run.latest is None or (run.latest.run == run.run and one.id > run.latest)]
    aborted = [one for one in after if one.state == "aborted"]
    if aborted:
        text = f"{count(len(aborted), 'save')} failed since the latest checkpoint: {_steps(aborted)}"
        yield Attention("warning", text, run.run, typed("tenuto", "ls", where, "--run", run.run))
    old_s = None if newest is None or newest.created_s is None else now_s - newest.created_s
    since = "" if old_s is None else f"; the latest checkpoint is {age(old_s)} old"
    status = typed("tenuto", "status", where, "--run", run.run)
    if run.trainer == "died":
        text = f"the process that trained it on {run.host or 'an unknown host'} ended without finishing{since}"
        yield Attention("warning", text, run.run, status)
    elif (
        run.trainer in ("training", "unknown")
        and old_s is not None
        and run.usual_s is not None
        and old_s > max(LATE * run.usual_s, run.usual_s + LATE_LEAST_S)
    ):
        text = f"the latest checkpoint is {age(old_s)} old; usually one is saved every {age(run.usual_s)}"
        yield Attention("warning", text, run.run, status)
    unfinished = [one for one in after if one.state == "unfinished"]
    if unfinished and run.trainer in ("died", "finished"):
        text = f"{count(len(unfinished), 'save')} cut off after the latest checkpoint: {_steps(unfinished)}"
        yield Attention("note", text, run.run, typed("tenuto", "gc", where, "--dry-run"))


def _verification(run: RunReport, where: str, now_s: float) -> Iterator[Attention]:
    whole = [one.checked_s for one in run.checkpoints if one.checked in ("verified", "proven") and one.checked_s]
    since = max(whole, default=None)
    oldest = min((one.created_s for one in run.checkpoints if one.created_s is not None), default=now_s)
    if now_s - (since or oldest) <= VERIFY_WITHIN_S:
        return
    text = f"last verified {age(now_s - since)} ago" if since else "none of its checkpoints was ever verified"
    yield Attention("warning", text, run.run, typed("tenuto", "verify", where, "--run", run.run))


def _values(run: RunReport, where: str) -> Iterator[Attention]:
    recent = {one.id: one for one in run.line[-RECENT:]}
    show = typed("tenuto", "show", where, "--run", run.run)
    wrong = _by_place({one.name: [recent[id] for id in one.nonfinite if id in recent] for one in run.metrics})
    for names, steps in wrong:
        yield Attention("warning", f"{names} not finite at {steps}", run.run, show)
    on_line = {one.id: one for one in run.line}
    lost = _by_place({one.name: [on_line[one.diverges]] for one in run.metrics if one.diverges in on_line})
    for names, steps in lost:
        yield Attention("warning", f"{names} diverges since {steps}", run.run, show)
    jumped = {one.name: [id for id in one.spikes if one.diverges is None or id < one.diverges] for one in run.metrics}
    out = _by_place({name: [recent[id] for id in ids if id in recent] for name, ids in jumped.items()})
    for names, steps in out:
        yield Attention("note", f"a spike in {names} at {steps}", run.run, show)
    sick = [one for one in recent.values() if one.unhealthy]
    if sick:
        yield Attention("damage", f"{sick[-1].health}: {_steps(sick)}", run.run, show)


def _by_place(found: Mapping[str, Sequence[CheckpointReport]]) -> Iterator[tuple[str, str]]:
    """Yields names of metrics that have something at the same steps, and those steps."""
    by_steps: dict[str, list[str]] = {}
    for name, saves in found.items():
        if saves:
            by_steps.setdefault(_steps(saves), []).append(name)
    for steps, names in by_steps.items():
        yield ", ".join(names), steps


def _steps(saves: Sequence[CheckpointReport]) -> str:
    """Returns which steps these are; of many, the first and the last."""
    steps = [f"{one.id.step:,}" for one in saves]
    word = "step" if len(steps) == 1 else "steps"
    return f"{word} {', '.join(steps)}" if len(steps) <= 4 else f"{word} {', '.join(steps[:2])}, … {steps[-1]}"
