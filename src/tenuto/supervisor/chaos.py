"""Faults put into a training on purpose: which, when and where, drawn or as written."""

from __future__ import annotations

import json
import random
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tenuto.errors import UsageError, did_you_mean
from tenuto.model.sizes import parse_time
from tenuto.record import record
from tenuto.supervisor.process_tree import ProcessTree
from tenuto.telemetry.heartbeat import Beat

SIGNALS: Final[Mapping[str, signal.Signals]] = {
    "kill": signal.SIGKILL,
    "abort": signal.SIGABRT,
    "stop": signal.SIGSTOP,
}
"""What becomes of a process: killed, killed as by a failed assertion, or stopped, so that it hangs."""
ASKED_FOR: Final = ("hang", "oom", "nan", "full-disk", "slow-store", "partition")
"""What a process puts into itself after its next step, by `telemetry.own_faults`: a step that never ends; an allocation
that does not fit; a tensor or array of the state that becomes NaN; and, for a while: a store that is full; one that is
slow; and connections through which nothing comes in."""
KINDS: Final = (*SIGNALS, *ASKED_FOR)
ENDING: Final = frozenset({*SIGNALS, "hang", "oom"})
"""Those that no process survives."""
LASTS_S: Final = 10.0
_EXAMPLE: Final = "--at 30s:kill,'step 400:nan'"


@record
class Fault:
    """A fault that is due once both have come. at_s: since the supervisor began. kind: of KINDS. step: completed steps.
    rank: of the process that it strikes; None: one that is drawn. lasts_s: of those that end by themselves."""

    at_s: float
    kind: str
    step: int = 0
    rank: int | None = None
    lasts_s: float = LASTS_S


def written(text: str, lasts_s: float = LASTS_S) -> list[Fault]:
    """Returns the faults of `10s:kill,step 40:nan`. Raises UsageError."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:step\s*(\d+)|(\d+(?:\.\d+)?)s?):([\w-]+)\s*", part)
        if match is None:
            raise UsageError(f"{part!r} is not a time and a fault", subject="--at", hint=_EXAMPLE)
        step, at_s = int(match[1] or 0), float(match[2] or 0)
        found.append(Fault(at_s, checked(match[3]), step, lasts_s=lasts_s))
    return _in_order(found)


def traced(path: Path, lasts_s: float = LASTS_S) -> list[Fault]:
    """Returns the faults of a file, a JSON object a line: `kind`, and `at` (a time) or `step`; optional: `rank`, and
    `lasts` (a time). Raises UsageError, with the line."""
    found = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", subject="--trace", hint="--trace faults.jsonl") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            given = json.loads(line)
            at, lasts = (parse_time(given[key], key) if key in given else None for key in ("at", "lasts"))
            if unknown := given.keys() - {"at", "step", "kind", "rank", "lasts"}:
                raise ValueError(f"{', '.join(sorted(unknown))} is not known")
            rank = None if given.get("rank") is None else int(given["rank"])
            lasts = lasts_s if lasts is None else lasts
            fault = Fault(at or 0.0, checked(str(given["kind"])), int(given.get("step", 0)), rank, lasts)
        except (ValueError, TypeError, KeyError, AttributeError, UsageError) as error:
            what = error.message if isinstance(error, UsageError) else str(error)
            what = f"{what} is missing" if isinstance(error, KeyError) else what
            hint = '{"at": "30s", "kind": "kill", "rank": 1}'
            raise UsageError(f"line {number} of {path}: {what}", subject=str(path), hint=hint) from None
        found.append(fault)
    return _in_order(found)


def _in_order(faults: Sequence[Fault]) -> list[Fault]:
    return sorted(faults, key=lambda fault: (fault.at_s, fault.step))


def drawn(every_s: float, number: int, kinds: Sequence[str], seed: int, lasts_s: float = LASTS_S) -> list[Fault]:
    """Returns faults that come without memory, `every_s` seconds apart on the average."""
    source, at_s, found = random.Random(seed), 0.0, []
    for _ in range(number):
        at_s += source.expovariate(1 / every_s)
        found.append(Fault(at_s, source.choice(list(map(checked, kinds))), lasts_s=lasts_s))
    return found


def checked(kind: str) -> str:
    if kind not in KINDS:
        raise UsageError(
            f"{kind!r} is not a fault; there are {', '.join(KINDS)}",
            subject=kind,
            hint=did_you_mean(kind, KINDS) or "--kinds kill,stop",
        )
    return kind


@dataclass
class Injector:
    """Puts faults into a running training, each once, into a process that has made a step by itself; which one is drawn
    by the seed."""

    faults: list[Fault]
    seed: int = 0
    injected: list[Fault] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._source = random.Random(self.seed)
        self._ending: set[int] = set()
        """Processes that a fault is about to end: it would hide another one."""

    def due(self, since_s: float) -> bool:
        """Returns whether the time of the next fault has come."""
        return bool(self.faults) and self.faults[0].at_s <= since_s

    def strike(self, tree: ProcessTree, directory: Path, training: Sequence[Beat]) -> dict[str, Any] | None:
        """Injects the next fault into one of the processes that train, and returns what the journal notes of it; None
        while there is none for it, or none has come to its step. directory: of their beats."""
        fault, living = self.faults[0], set(tree.descendants())
        there = sorted(
            (beat for beat in training if beat.pid in living and beat.step > beat.began), key=lambda beat: beat.pid
        )
        if not there or max(beat.step for beat in there) < fault.step or self._ending & {beat.pid for beat in there}:
            return None
        there = [beat for beat in there if fault.rank in (None, beat.rank)]
        if not there:
            return None
        one = self._source.choice(there)
        self.injected.append(self.faults.pop(0))
        if fault.kind in ENDING:
            self._ending.add(one.pid)
        if fault.kind in SIGNALS:
            tree.strike(one.pid, SIGNALS[fault.kind])
        else:
            from tenuto.telemetry.own_faults import ask

            ask(directory, one.rank, one.pid, fault.kind, fault.lasts_s)
        return {"kind": fault.kind, "due_s": round(fault.at_s, 3), "pid": one.pid, "rank": one.rank, "step": one.step}
