"""Reports a demo to people and to programs."""

from __future__ import annotations

import sys
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tenuto.demo.children import Life
from tenuto.demo.outcome import Account
from tenuto.errors import typed
from tenuto.units import count, seconds, size

BAR: Final = 23
PIPE_WIDTH: Final = 1000
MOST_LIVES: Final = 25
"""With more processes, only numbers are shown."""


def document(account: Account) -> dict[str, Any]:
    """Returns the account as one JSON object: durations in seconds, sizes in bytes."""
    return {
        "equal": account.comparison.equal,
        "difference": account.comparison.difference,
        "leaves": account.comparison.leaves,
        "kills": account.kills,
        "kills_while_saving": account.kills_while_saving,
        "steps": account.plan.steps,
        "steps_done_again": list(account.lost),
        "steps_done_again_from_disk_alone": list(account.lost_from_disk),
        "restarts_from_memory": account.from_memory,
        "restarts_from_disk": account.from_disk,
        "restarts_from_scratch": account.from_scratch,
        "not_kept_in_memory": account.memory_off or None,
        "save_every": account.plan.save_every,
        "saves": len(account.stalls_s),
        "stall_median_s": account.stall_s,
        "kept_in_memory": len(account.memory_stalls_s),
        "stall_in_memory_median_s": account.memory_stall_s,
        "one_copy_s": account.copy_s,
        "state_bytes": account.bytes,
        "loss": account.loss,
        "seconds": account.seconds,
        "seed": account.plan.seed,
    }


def show(account: Account, kept: str | None) -> None:
    """Prints the account on stdout; without a terminal, without colour or folded lines."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    console.print(rendered(account, kept, unicode=console.encoding.lower().startswith("utf")))


def rendered(account: Account, kept: str | None, *, unicode: bool = True) -> RenderableType:
    """Returns the processes of the killed run, a short table, and the verdict."""
    equal = account.comparison.equal
    mark = Text("EQUAL" if equal else "DIFFERENT", style="bold green" if equal else "bold red")
    parts: list[RenderableType] = []
    if 1 < len(account.lives) <= MOST_LIVES:
        parts += [_lives(account, unicode), Text()]
    parts += [_table(account), Text(), Text.assemble(mark, "  ", verdict(account))]
    if kept is not None:
        parts.append(
            Text(f"Kept in {kept}; look at it with: {typed('tenuto', 'ls', f'{kept}/checkpoints')}", style="dim")
        )
    return Group(*parts)


def _lives(account: Account, unicode: bool) -> Table:
    """Returns one row for each process: from the step it resumed at to the one it was killed in."""
    table = Table.grid(padding=(0, 2))
    stroke, end = ("━", "╳") if unicode else ("=", "x")
    for number, life in enumerate(account.lives, 1):
        begin, stop = (round((step or 0) / account.plan.steps * BAR) for step in (life.began, life.at))
        bar = Text(" " * begin)
        bar.append(stroke * max(stop - begin, 1), style="cyan" if life.killed else "green")
        bar.append(end if life.killed else "", style="bold red")
        words = _life_text(life, None if number == 1 else _source(life))
        table.add_row(Text(f"process {number}", style="dim"), bar, words)
    return table


def _life_text(life: Life, source: str | None) -> str:
    how = "killed" + (" in a save" if life.saving else "") if life.killed else "finished"
    if life.began is None:
        return f"{how} before its first step"
    return f"{f'{source}: ' if source else ''}steps {life.began} to {life.at}, {how}"


def _source(life: Life) -> str:
    if life.restored is None:
        return "scratch"
    return "memory" if life.adopted else "disk"


def _table(account: Account) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    for name, value in lines(account):
        table.add_row(name, Text(value))
    return table


def lines(account: Account) -> list[tuple[str, str]]:
    """Returns the rows of the table."""
    loss = "" if account.loss is None else f", loss {account.loss:.3f}"
    copy = "" if account.copy_s is None else f" (one copy in memory: {seconds(account.copy_s)})"
    found = [
        ("trained", f"a GPT for {account.plan.steps} steps{loss}, saving every {account.plan.save_every}"),
        ("kill -9", f"{account.kills} times, {account.kills_while_saving} of them during a save"),
        ("came back", _came_back(account)),
        ("steps done again", _again(account.lost)),
        ("stall per save", _stall(account.stall_s, len(account.stalls_s), "save", copy)),
        ("a checkpoint", f"{size(account.bytes)} in {account.comparison.leaves} leaves"),
        ("took", seconds(account.seconds)),
    ]
    if account.plan.memory:
        alone = ("with the disk alone", _again(account.lost_from_disk))
        kept = (
            "stall per step",
            _stall(account.memory_stall_s, len(account.memory_stalls_s), "step", " kept in memory"),
        )
        found[4:5] = [alone, found[4], kept]
    if account.memory_off:
        found.insert(3, ("not in memory", f"{account.memory_off}; what was not kept there comes from disk"))
    return found


def _came_back(account: Account) -> str:
    ways = [(account.from_memory, "memory"), (account.from_disk, "disk"), (account.from_scratch, "scratch")]
    ways_text = [f"{count(number, 'time')} from {way}" for number, way in ways if number]
    return ", ".join(ways_text) or "never"


def _again(lost: tuple[int, ...]) -> str:
    return f"{sum(lost)} in all, at most {max(lost)} per kill" if lost else "none"


def _stall(stall_s: float | None, number: int, noun: str, more: str) -> str:
    return "none" if stall_s is None else f"{seconds(stall_s)}, median of {count(number, noun)}{more}"


def verdict(account: Account) -> str:
    """Returns the verdict in one sentence."""
    if not account.comparison.equal:
        return f"The killed run ended in another state than the untouched one: {account.comparison.difference}"
    if not account.kills:
        return "The two runs ended alike, but nothing was killed: it proves nothing."
    return (
        "The killed run ended in exactly the state of one that was never touched: weights, optimizer, scheduler, "
        "random generators and position in the data, bit for bit."
    )
