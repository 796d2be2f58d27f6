"""What became of each fault of a rehearsal, by the journal of its supervisor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tenuto.record import record
from tenuto.report.supervision import Outage, read_lines, supervision_of
from tenuto.units import count, seconds


@record
class Struck:
    """One fault, or an end that none of them explains (`kind` "", as the rest of it).

    kind: of `supervisor.chaos.KINDS`. at_s: since the supervisor began. rank, step: of the process that was struck.
    outage: the end that followed from it; None where training continued.
    """

    kind: str
    at_s: float
    rank: int | None = None
    step: int | None = None
    outage: Outage | None = None

    def words(self, *, cost: bool = True) -> str:
        """Returns what the supervisor did, and with `cost` what it cost."""
        one = self.outage
        if one is None:
            return "training continued"
        parts = [f"{one.kind} ({one.evidence})"]
        if one.resumed is not None:
            parts.append(f"resumed at step {one.resumed}")
        if one.how:
            parts.append(one.how)
        if cost and one.lost_steps is not None:
            parts.append(f"{count(one.lost_steps, 'step')} again")
        if cost:
            parts.append(f"as far after {seconds(one.lost_s)}" if one.lost_s is not None else "no new step since")
        return "; ".join(parts)

    def document(self) -> dict[str, Any]:
        found = {"kind": self.kind or None, "at_s": round(self.at_s, 3), "rank": self.rank, "step": self.step}
        return {**found, "outage": None if self.outage is None else asdict(self.outage)}


def read_struck(journal: Path) -> list[Struck]:
    """Returns the faults that a journal tells of, in their order, each with what followed, and ends without a fault."""
    lines = list(read_lines(journal))
    whole = supervision_of(journal, lines)
    return [] if whole is None else _matched(lines, whole.began_s, whole.outages)


def _matched(lines: Iterable[dict[str, Any]], began_s: float, outages: Iterable[Outage]) -> list[Struck]:
    found: list[Struck] = []
    open_here: list[int] = []
    """The faults of this start whose effect is not known yet, and values that went wrong before it."""
    following = iter(outages)
    for line in lines:
        if line["event"] == "injected":
            open_here.append(len(found))
            where = (line.get("rank"), line.get("step"))
            found.append(Struck(str(line.get("kind")), line["at_s"] - began_s, *where))
        elif line["event"] == "died":
            outage = next(following)
            spoilt = [number for number in open_here if found[number].kind == "nan"]
            others = [number for number in open_here if number not in spoilt]
            explains = spoilt if outage.kind == "unhealthy" or not others else others
            if explains:
                one = found[explains[-1]]
                found[explains[-1]] = Struck(one.kind, one.at_s, one.rank, one.step, outage)
            else:
                found.append(Struck("", line["at_s"] - began_s, None, outage.step, outage))
            open_here = [number for number in spoilt if number not in explains]
    return found
