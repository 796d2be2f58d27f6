"""`python -m campaigns.rank_phases.table`: puts the times of the committed result into `docs/design/waits.md`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
RESULT: Final = ROOT / "benchmarks" / "results" / "r5_phases.json"
PAGE: Final = ROOT / "docs" / "design" / "waits.md"
BEGIN: Final = "<!-- times: written by campaigns.rank_phases.table -->"
END: Final = "<!-- end of times -->"
TITLES: Final = {
    "SIGKILL": "Killed (`SIGKILL`)",
    "SIGSTOP": "Stopped (`SIGSTOP`)",
    "gone": "The directory where ranks meet is gone",
    "hung": "The directory where ranks meet does not answer",
    "emptied": "The directory where ranks meet is emptied",
}


def tables(waits: Sequence[dict[str, Any]]) -> str:
    """Returns one table for each kind of loss: phases down, who is struck across."""
    return "\n\n".join("\n".join(_table(waits, how)) for how in TITLES if any(row["how"] == how for row in waits))


def _table(waits: Sequence[dict[str, Any]], how: str) -> Iterator[str]:
    rows = [row for row in waits if row["how"] == how]
    phases, struck = (list(dict.fromkeys(row[name] for row in rows)) for name in ("phase", "who"))
    promised = sorted({row["promised_s"] for row in rows})
    within = " to ".join(f"{one:g} s" for one in dict.fromkeys([promised[0], promised[-1]]))
    yield f"**{TITLES[how]}**: promised within {within}."
    yield ""
    yield f"| phase | {' | '.join(struck)} |"
    yield "|---|" + "---|" * len(struck)
    found = {(row["phase"], row["who"]): f"{row['raised_s']:.1f} / {row['left_s']:.1f}" for row in rows}
    for phase in phases:
        yield f"| {phase} | " + " | ".join(found.get((phase, who), "") for who in struck) + " |"


def page(text: str, waits: Sequence[dict[str, Any]]) -> str:
    """Returns the page with these times in it."""
    before, _, rest = text.partition(BEGIN)
    _, _, behind = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables(waits)}\n\n{END}{behind}"


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(), json.loads(RESULT.read_text())["waits"]))


if __name__ == "__main__":
    main()
