"""Faults put into a training on purpose: which, when and where, drawn or as written."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tenuto.errors import UsageError, did_you_mean
from tenuto.supervisor.process_tree import ProcessTree

KINDS: Final[Mapping[str, signal.Signals]] = {
    "kill": signal.SIGKILL,
    "abort": signal.SIGABRT,
    "stop": signal.SIGSTOP,
}
"""What becomes of a process: killed, killed as by a failed assertion, or stopped, so that it hangs."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`at_s`: since the supervisor began. `kind`: of KINDS."""

    at_s: float
    kind: str


def written(text: str) -> list[Fault]:
    """Returns the faults of `10s:kill,25s:stop`. Raises UsageError."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)s?:(\w+)\s*", part)
        if match is None:
            raise UsageError(f"{part!r} is not a time and a fault", subject="--at", hint="--at 10s:kill,25s:stop")
        found.append(Fault(float(match[1]), checked(match[2])))
    return sorted(found, key=lambda fault: fault.at_s)


def drawn(every_s: float, number: int, kinds: Sequence[str], seed: int) -> list[Fault]:
    """Returns faults that come without memory, `every_s` seconds apart on the average."""
    source, at_s, found = random.Random(seed), 0.0, []
    for _ in range(number):
        at_s += source.expovariate(1 / every_s)
        found.append(Fault(at_s, source.choice(list(map(checked, kinds)))))
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
    """Puts faults into a running training, each once, into a process that trains; which one is drawn by the seed."""

    faults: list[Fault]
    seed: int = 0
    injected: list[Fault] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._source = random.Random(self.seed)

    def due(self, since_s: float) -> bool:
        """Returns whether the next fault is due."""
        return bool(self.faults) and self.faults[0].at_s <= since_s

    def strike(self, tree: ProcessTree, training: Sequence[int]) -> tuple[Fault, int] | None:
        """Injects the next fault into one of the processes `training`, and returns it with the process; None while
        there is none of them."""
        there = sorted(set(training) & set(tree.descendants()))
        if not there:
            return None
        fault, pid = self.faults.pop(0), self._source.choice(there)
        tree.strike(pid, KINDS[fault.kind])
        self.injected.append(fault)
        return fault, pid
