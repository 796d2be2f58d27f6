"""The account of a demo, for a person and for a machine."""

from __future__ import annotations

import sys
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast.demo.runner import Account
from holdfast.report.measures import seconds, size

BAR: Final = 26
PIPE_WIDTH: Final = 1000
MOST_LIVES: Final = 25
"""More are told in numbers only."""


def document(account: Account) -> dict[str, Any]:
    """As one JSON object. Durations in seconds, sizes in bytes."""
    return {
        "equal": account.comparison.equal,
        "difference": account.comparison.difference,
        "leaves": account.comparison.leaves,
        "kills": account.kills,
        "kills_while_saving": account.kills_while_saving,
        "steps": account.plan.steps,
        "steps_done_again": list(account.lost),
        "save_every": account.plan.save_every,
        "saves": len(_stalls(account)),
        "stall_median_s": account.stall_s,
        "one_copy_s": account.copy_s,
        "state_bytes": account.bytes,
        "loss": account.loss,
        "seconds": account.seconds,
        "seed": account.plan.seed,
    }


def show(account: Account, kept: str | None) -> None:
    """Prints the account on stdout. Without a terminal: no colour, and no line is folded."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    console.print(rendered(account, kept, unicode=console.encoding.lower().startswith("utf")))


def rendered(account: Account, kept: str | None, *, unicode: bool = True) -> RenderableType:
    """The lives of the killed run, a short table, and the verdict."""
    equal = account.comparison.equal
    mark = Text("EQUAL" if equal else "DIFFERENT", style="bold green" if equal else "bold red")
    parts: list[RenderableType] = []
    if 1 < len(account.lives) <= MOST_LIVES:
        parts += [_lives(account, unicode), Text()]
    parts += [_table(account), Text(), Text.assemble(mark, "  ", verdict(account))]
    if kept is not None:
        parts.append(Text(f"Kept in {kept}; look at it with: holdfast ls {kept}/checkpoints", style="dim"))
    return Group(*parts)


def _lives(account: Account, unicode: bool) -> Table:
    """One row for each process: from the step that it resumed at to the one that it was killed in."""
    table = Table.grid(padding=(0, 2))
    stroke, end = ("━", "╳") if unicode else ("=", "x")
    for number, life in enumerate(account.lives, 1):
        begin, stop = (round((step or 0) / account.plan.steps * BAR) for step in (life.began, life.reached))
        bar = Text(" " * begin)
        bar.append(stroke * max(stop - begin, 1), style="cyan" if life.killed else "green")
        bar.append(end if life.killed else "", style="bold red")
        how = "killed" + (" in a save" if life.saving else "") if life.killed else "finished"
        words = (
            f"steps {life.began} to {life.reached}, {how}" if life.began is not None else f"{how} before its first step"
        )
        table.add_row(Text(f"process {number}", style="dim"), bar, words)
    return table


def _table(account: Account) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    for name, value in lines(account):
        table.add_row(name, Text(value))
    return table


def lines(account: Account) -> list[tuple[str, str]]:
    """What is told, by name."""
    lost = account.lost
    again = f"{sum(lost)} in all, at most {max(lost)} per kill" if lost else "none"
    stall = (
        "none" if account.stall_s is None else f"{seconds(account.stall_s)}, median of {len(_stalls(account))} saves"
    )
    copy = "" if account.copy_s is None else f" (one copy in memory: {seconds(account.copy_s)})"
    loss = "" if account.loss is None else f", loss {account.loss:.3f}"
    return [
        ("trained", f"a GPT for {account.plan.steps} steps{loss}, saving every {account.plan.save_every}"),
        ("kill -9", f"{account.kills} times, {account.kills_while_saving} of them during a save"),
        ("steps done again", again),
        ("stall per save", stall + copy),
        ("a checkpoint", f"{size(account.bytes)} in {account.comparison.leaves} leaves"),
        ("took", seconds(account.seconds)),
    ]


def verdict(account: Account) -> str:
    """One sentence."""
    if not account.comparison.equal:
        return f"The killed run ended in another state than the untouched one: {account.comparison.difference}"
    if not account.kills:
        return "The two runs ended alike, but nothing was killed: it proves nothing."
    return (
        "The killed run ended in exactly the state of one that was never touched: weights, optimizer, scheduler, "
        "random generators and position in the data, bit for bit."
    )


def _stalls(account: Account) -> list[float]:
    return [stall for life in (account.untouched, *account.lives) for stall in life.stalls_s]
