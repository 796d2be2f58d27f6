"""What is done before a training is started again, by the cause of its end: one table, which users extend."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, get_args

from tenuto.errors import TenutoError, UsageError, did_you_mean
from tenuto.record import record
from tenuto.supervisor.decide import CAUSES, HOUR_S, Ending, Kind
from tenuto.supervisor.detectors.contract import FINDINGS
from tenuto.supervisor.restart import Restart, restart
from tenuto.telemetry.last_words import LastWords

Strategy = Literal["restart", "rollback", "smaller-batch", "shrink", "repair", "stop"]
"""restart: as it is. rollback: from the newest healthy checkpoint before what went wrong, whose batches the script may
skip. smaller-batch: the script halves its batches, and accumulates twice as many. shrink: from the second time within
an hour on, with fewer ranks. repair: what is damaged is repaired first. stop: not at all."""
STRATEGIES: Final[tuple[Strategy, ...]] = get_args(Strategy)

TABLE: Final[Mapping[Kind, Strategy]] = {
    "failed": "restart",
    "killed": "restart",
    "hung": "restart",
    "disk full": "restart",
    "out of memory": "smaller-batch",
    "unhealthy": "rollback",
    "device": "shrink",
    "damaged": "repair",
}
"""What is done about each cause unless told otherwise."""

RANKS: Final = "{ranks}"
"""What stands for the number of ranks in a command."""
_EXAMPLE: Final = "--on hung=stop, --on out-of-memory=smaller-batch:3"


@record
class Rules:
    """table: what is done about each cause. most: how often a cause may end the training within an hour."""

    table: Mapping[Kind, Strategy] = field(default_factory=lambda: TABLE)
    most: Mapping[Kind, int] = field(default_factory=dict)


def written(texts: Iterable[str]) -> Rules:
    """Returns the table with `CAUSE=STRATEGY` or `CAUSE=STRATEGY:N` put over it; N: as `Rules.most`. Raises
    UsageError."""
    table: dict[Any, Any] = dict(TABLE)
    most: dict[Any, int] = {}
    for text in texts:
        match = re.fullmatch(r"\s*([\w-]+)\s*=\s*([\w-]+?)\s*(?::\s*([1-9]\d*)\s*)?", text)
        if match is None:
            raise UsageError(f"{text!r} is not a cause and a strategy", subject=text, hint=_EXAMPLE)
        cause, strategy = match[1].replace("-", " "), match[2]
        for name, known, more in ((cause, CAUSES, FINDINGS), (strategy, STRATEGIES, ())):
            if name not in known:
                raise UsageError(
                    f"{text!r}: there is no {name!r}, but {', '.join((*known, *more))}",
                    subject=text,
                    hint=did_you_mean(match[1] if more else name, (*known, *more)) or _EXAMPLE,
                )
        table[cause] = strategy
        if match[3]:
            most[cause] = int(match[3])
    return Rules(table, most)


_OUT_OF_MEMORY: Final = frozenset({"OutOfMemoryError", "MemoryError"})
_DEVICE: Final = re.compile(r"CUDA error|HIP error|uncorrectable ECC|\bXid\b|GPU is lost|fallen off the bus", re.I)


def cause_of(words: LastWords) -> Kind:
    """Returns the cause of an end by what the process has said of it."""
    names = set(words.errors)
    if words.unhealthy:
        return "unhealthy"
    if names & _OUT_OF_MEMORY or "RESOURCE_EXHAUSTED" in words.message:
        return "out of memory"
    if "StoreFull" in names or "No space left on device" in words.message:
        return "disk full"
    if "NothingRestorable" in names:
        return "damaged"
    if "AcceleratorError" in names or _DEVICE.search(words.message):
        return "device"
    return "failed"


def decisive(words: Sequence[LastWords]) -> LastWords | None:
    """Returns the last words that say most of an end: the earliest, and that a rank has lost another one only where
    nobody says more."""
    return min(words, key=lambda one: ("RanksError" in one.errors, one.at_s), default=None)


def evidence_of(words: LastWords, ranks: int) -> str:
    """Returns it in words. ranks: how many there are."""
    return f"{words.message}, on rank {words.rank}" if ranks > 1 else words.message


@dataclass
class Recovery:
    """Does what the table says, and keeps what each next start is to be given.

    roll_back: goes back, of the place and run of the last words, to the newest healthy checkpoint before a step, and
    returns that one's step; None where there is none. repair: returns in words what it has repaired. sizes: the
    numbers of ranks to train with, the largest first; empty for a command without that.
    """

    rules: Rules = field(default_factory=Rules)
    roll_back: Callable[[LastWords, int], int | None] = lambda words, before: None
    repair: Callable[[LastWords], str] = lambda words: ""
    sizes: Sequence[int] = ()
    next: Restart = field(default_factory=Restart)
    _size: int = 0
    _went_back_to: int | None = None

    def state(self) -> dict[str, Any]:
        """Returns what it keeps, for the supervisors of other nodes, which `adopt` it."""
        return {"next": self.next.variables(), "size": self._size, "went_back_to": self._went_back_to}

    def adopt(self, state: Mapping[str, Any]) -> None:
        self.next, self._size, self._went_back_to = restart(state["next"]), state["size"], state["went_back_to"]

    def command(self, words: Sequence[str]) -> list[str]:
        """Returns the command of the next start, with its number of ranks."""
        size = str(self.sizes[self._size]) if self.sizes else RANKS
        return [word.replace(RANKS, size) for word in words]

    def prepare(self, endings: Sequence[Ending], report: Callable[[str], None]) -> str:
        """Does what the last of `endings` asks for, and returns it in words that follow "started again"; empty where
        nothing is different. What cannot be done is reported, and keeps nobody from starting."""
        last = endings[-1]
        self.next = replace(self.next, number=len(endings), cause=last.kind)
        strategy = self.rules.table.get(last.kind, "restart")
        try:
            return self._done(strategy, endings, last)
        except TenutoError as error:
            report(f"{strategy} is not possible: {error.message}")
            return ""

    def _done(self, strategy: Strategy, endings: Sequence[Ending], last: Ending) -> str:
        if strategy == "smaller-batch":
            self.next = replace(self.next, accumulation=self.next.accumulation * 2)
            return f"and asked for 1/{self.next.accumulation} of the batch"
        if strategy == "shrink" and self.sizes:
            recent = sum(last.ended_s - one.ended_s < HOUR_S and one.kind == last.kind for one in endings)
            if recent < 2 or self._size + 1 == len(self.sizes):
                return ""
            self._size += 1
            return f"with {self.sizes[self._size]} ranks"
        if strategy == "repair" and last.words is not None and last.words.where:
            return self.repair(last.words)
        if strategy == "rollback":
            return self._rolled_back(last)
        return ""

    def _rolled_back(self, last: Ending) -> str:
        """Goes back; where it has gone back and come to nothing new since, to one before."""
        words = last.words
        if words is None or not words.where:
            raise UsageError("the training has not said which run it trains, and where", subject=last.kind)
        before = words.step
        if not last.new and self._went_back_to is not None:
            before = min(before, self._went_back_to)
        step = self.roll_back(words, before)
        if step is None and before < words.step:
            step = self.roll_back(
                words, words.step
            )  # the oldest healthy one was tried already, and is the best there is
        if step is None:
            raise UsageError(f"run {words.run!r} has no healthy checkpoint before step {words.step}", subject=words.run)
        self._went_back_to = step
        span = range(step + 1, words.step + 1)
        if span:
            others = tuple(one for one in self.next.skip if one.start < span.start or one.stop > span.stop)
            self.next = replace(self.next, skip=(*others, span))
        return f"from step {step}, before what went wrong"
