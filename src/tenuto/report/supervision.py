"""What the journals of `tenuto run` say of a training: how often it ended, and what each end cost.

A journal is a file of JSON lines on the machine that supervised. A line that is cut off, or that another program has
written, is passed over.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from tenuto.errors import UsageError
from tenuto.record import record
from tenuto.regular_files import opener

LARGEST: Final = 64 << 20
"""Bytes of a journal that are read, its newest: stacks of hung ranks are long."""


@record
class Outage:
    """One end that nobody asked for, and the way back. Times are seconds.

    ended_s: since 1970. step: the last completed one. resumed: the step that the next start resumed at; lost_steps: how
    many had to be trained again, which is the recovery point as it was (RPO). lost_s: until training had come to a new
    step, which is the recovery time as it was (RTO); None where it never has. how: what was done, beside a restart.
    """

    kind: str
    evidence: str
    ended_s: float
    step: int | None
    resumed: int | None = None
    lost_steps: int | None = None
    lost_s: float | None = None
    how: str = ""


@record
class Supervision:
    """One `tenuto run`. began_s, ended_s: since 1970; where it still runs, or was killed, ended_s is its last line's.
    ettr: the share of its time in which training came to new steps (effective training time ratio); lost_s: the rest,
    from each end to the first new step. reason: why it ended; empty where it has not."""

    journal: str
    began_s: float
    ended_s: float
    step: int | None
    lost_s: float
    ettr: float
    outages: tuple[Outage, ...]
    reason: str = ""
    status: int | None = None


def supervisions(journals: Iterable[Path]) -> list[Supervision]:
    """Returns what the journals say, the earliest first. Raises UsageError for a file that cannot be read or that is no
    journal."""
    found = []
    for path in journals:
        try:
            one = supervision_of(path, list(read_lines(path)))
        except OSError as error:
            raise UsageError(
                f"the journal {path} cannot be read: {(error.strerror or '').lower()}",
                subject="--journal",
                hint="tenuto run prints where its journal is",
            ) from None
        if one is None:
            raise UsageError(
                f"{path} is not a journal of tenuto run", subject="--journal", hint="tenuto run --journal FILE -- …"
            )
        found.append(one)
    return sorted(found, key=lambda one: one.began_s)


def known(directory: Path, where: str) -> list[Path]:
    """Returns the journals in a directory of those that trained runs of the repository at `where`."""
    found = []
    for path in sorted(directory.glob("*.jsonl")) if directory.is_dir() else []:
        try:
            there = any(line.get("event") == "training" and line.get("where") == where for line in read_lines(path))
        except OSError:
            continue
        if there:
            found.append(path)
    return found


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the events of a journal, each with when it was, `at_s` since 1970."""
    with open(path, "rb", opener=opener) as file:
        file.seek(max(path.stat().st_size - LARGEST, 0))
        for line in file:
            try:
                value = json.loads(line)
                if isinstance(value, dict) and "event" in value:
                    yield {**value, "at_s": datetime.fromisoformat(value["time"]).timestamp()}
            except (ValueError, KeyError, TypeError):
                continue


def supervision_of(path: Path, lines: Sequence[dict[str, Any]]) -> Supervision | None:
    """Returns what the events of a journal say; None where they are not those of a supervisor."""
    first = next((line for line in lines if line["event"] == "supervising"), None)
    if first is None:
        return None
    outages: list[dict[str, Any]] = []
    down: list[dict[str, Any]] = []
    """Those that training has not made good yet: several, where it died again on the way."""
    lost_s, step = 0.0, None
    for line in lines:
        match line["event"]:
            case "died":
                step = _higher(step, line.get("step"))
                down.append(
                    {"kind": str(line.get("kind")), "evidence": str(line.get("evidence", "")), "ended_s": line["at_s"],
                     "step": line.get("step")}
                )  # fmt: skip
                outages.append(down[-1])
            case "restarting" if down:
                down[-1]["how"] = str(line.get("how", ""))
            case "resumed" if down and isinstance(line.get("step"), int):
                down[-1]["resumed"] = line["step"]
                if isinstance(down[-1]["step"], int):
                    down[-1]["lost_steps"] = max(down[-1]["step"] - line["step"], 0)
            case "recovered":
                step = _higher(step, line.get("step"))
                if down:
                    lost_s += line["at_s"] - down[0]["ended_s"]
                for one in down:
                    one["lost_s"] = line["at_s"] - one["ended_s"]
                down.clear()
            case "left" | "ended":
                step = _higher(step, line.get("step"))
            case _:
                pass
    last, began_s = lines[-1], first["at_s"]
    if down:
        lost_s += last["at_s"] - down[0]["ended_s"]
    elapsed_s = max(last["at_s"] - began_s, 1e-3)
    ended = last if last["event"] == "ended" else {}
    return Supervision(
        str(path), began_s, last["at_s"], step, lost_s,
        max(1 - lost_s / elapsed_s, 0.0), tuple(Outage(**one) for one in outages),
        str(ended.get("reason", "")), ended.get("status"),
    )  # fmt: skip


def _higher(step: int | None, other: Any) -> int | None:
    return max(step or 0, other) if isinstance(other, int) else step
