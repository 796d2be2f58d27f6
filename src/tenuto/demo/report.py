"""Reports a demo's outcome to people and to programs."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tenuto.demo.processes import Life
from tenuto.demo.runner import Outcome
from tenuto.errors import typed
from tenuto.units import count, seconds, size

BAR: Final = 23
PIPE_WIDTH: Final = 1000
MOST_LIVES: Final = 25
"""With more processes, only numbers are shown."""


def document(outcome: Outcome) -> dict[str, Any]:
    """Returns the outcome as one JSON object: durations in seconds, sizes in bytes."""
    return {
        "equal": outcome.comparison.equal,
        "difference": outcome.comparison.difference,
        "leaves": outcome.comparison.leaves,
        "kills": outcome.kills,
        "kills_while_saving": outcome.kills_while_saving,
        "steps": outcome.plan.steps,
        "steps_done_again": outcome.lost,
        "steps_done_again_from_disk_alone": outcome.lost_from_disk,
        "restarts_from_memory": outcome.restarts("memory"),
        "restarts_from_disk": outcome.restarts("disk"),
        "restarts_from_scratch": outcome.restarts("scratch"),
        "not_kept_in_memory": outcome.memory_off or None,
        "save_every": outcome.plan.save_every,
        "saves": len(outcome.stalls_s),
        "stall_median_s": _median(outcome.stalls_s),
        "kept_in_memory": len(outcome.memory_stalls_s),
        "stall_in_memory_median_s": _median(outcome.memory_stalls_s),
        "one_copy_s": outcome.copy_s,
        "state_bytes": outcome.bytes,
        "loss": outcome.loss,
        "seconds": outcome.seconds,
        "seed": outcome.plan.seed,
    }


def show(outcome: Outcome, kept: str | None) -> None:
    """Prints the outcome on stdout; without a terminal, without colour or folded lines."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    console.print(rendered(outcome, kept, unicode=console.encoding.lower().startswith("utf")))


def rendered(outcome: Outcome, kept: str | None, *, unicode: bool = True) -> RenderableType:
    """Returns the processes of the killed run, a short table, and the verdict."""
    equal = outcome.comparison.equal
    mark = Text("EQUAL" if equal else "DIFFERENT", style="bold green" if equal else "bold red")
    parts: list[RenderableType] = []
    if 1 < len(outcome.lives) <= MOST_LIVES:
        parts += [_lives(outcome, unicode), Text()]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    for name, value in lines(outcome):
        table.add_row(name, Text(value))
    parts += [table, Text(), Text.assemble(mark, "  ", verdict(outcome))]
    if kept is not None:
        parts.append(
            Text(f"Kept in {kept}; look at it with: {typed('tenuto', 'ls', f'{kept}/checkpoints')}", style="dim")
        )
    return Group(*parts)


def _lives(outcome: Outcome, unicode: bool) -> Table:
    """Returns one row for each process: from the step it resumed at to the one it was killed in."""
    table = Table.grid(padding=(0, 2))
    stroke, end = ("━", "╳") if unicode else ("=", "x")
    for number, life in enumerate(outcome.lives, 1):
        begin, stop = (round((step or 0) / outcome.plan.steps * BAR) for step in (life.began, life.at))
        bar = Text(" " * begin)
        bar.append(stroke * max(stop - begin, 1), style="cyan" if life.killed else "green")
        bar.append(end if life.killed else "", style="bold red")
        table.add_row(Text(f"process {number}", style="dim"), bar, _life_text(life, first=number == 1))
    return table


def _life_text(life: Life, *, first: bool) -> str:
    ending = "finished" if not life.killed else "killed in a save" if life.saving else "killed"
    if life.began is None:
        return f"{ending} before its first step"
    return f"{'' if first else f'{life.source}: '}steps {life.began} to {life.at}, {ending}"


def lines(outcome: Outcome) -> list[tuple[str, str]]:
    """Returns the rows of the table."""
    loss = "" if outcome.loss is None else f", loss {outcome.loss:.3f}"
    copy = "" if outcome.copy_s is None else f" (one copy in memory: {seconds(outcome.copy_s)})"
    restarts = [(outcome.restarts(source), source) for source in ("memory", "disk", "scratch")]
    restarts_text = ", ".join(f"{count(number, 'time')} from {source}" for number, source in restarts if number)
    found = [
        ("trained", f"a GPT for {outcome.plan.steps} steps{loss}, saving every {outcome.plan.save_every}"),
        ("kill -9", f"{outcome.kills} times, {outcome.kills_while_saving} of them during a save"),
        ("came back", restarts_text or "never"),
    ]
    if outcome.memory_off:
        found.append(("not in memory", f"{outcome.memory_off}; what was not kept there comes from disk"))
    found.append(("steps done again", _again(outcome.lost)))
    if outcome.plan.memory:
        found.append(("with the disk alone", _again(outcome.lost_from_disk)))
    found.append(("stall per save", _stall(outcome.stalls_s, "save", copy)))
    if outcome.plan.memory:
        found.append(("stall per step", _stall(outcome.memory_stalls_s, "step", " kept in memory")))
    return [
        *found,
        ("a checkpoint", f"{size(outcome.bytes)} in {outcome.comparison.leaves} leaves"),
        ("took", seconds(outcome.seconds)),
    ]


def _again(lost: Sequence[int]) -> str:
    return f"{sum(lost)} in all, at most {max(lost)} per kill" if lost else "none"


def _stall(stalls_s: Sequence[float], noun: str, more: str) -> str:
    return (
        f"{seconds(statistics.median(stalls_s))}, median of {count(len(stalls_s), noun)}{more}" if stalls_s else "none"
    )


def _median(found: Sequence[float]) -> float | None:
    return statistics.median(found) if found else None


def verdict(outcome: Outcome) -> str:
    """Returns the verdict in one sentence."""
    if not outcome.comparison.equal:
        return f"The killed run ended in another state than the untouched one: {outcome.comparison.difference}"
    if not outcome.kills:
        return "The two runs ended alike, but nothing was killed: it proves nothing."
    return (
        "The killed run ended in exactly the state of one that was never touched: weights, optimizer, scheduler, "
        "random generators and position in the data, bit for bit."
    )
