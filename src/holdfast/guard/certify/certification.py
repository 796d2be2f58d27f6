"""The certification: the script run whole, then killed and resumed, and only where they differ run whole once more."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.guard.certify.order import order_of
from holdfast.guard.certify.script import Launch, Script, launch
from holdfast.image.arena import free_shared_memory
from holdfast.model.trail import Trail
from holdfast.policy.exactness.verdict import Trails, Verdict, differs, judge

WHOLE: Final = "uninterrupted"
INTERRUPTED: Final = "to be killed"
RESUMED: Final = "resumed"
REPEATED: Final = "uninterrupted again"

Tell = Callable[[str, int, int], None]
"""Told how far it is: which run, steps completed, steps wanted."""


@dataclass(frozen=True, slots=True)
class Life:
    """One process: the steps that it began and ended at."""

    name: str
    began: int
    reached: int
    seconds: float
    killed: bool


@dataclass(frozen=True, slots=True)
class Certification:
    """What was done and found. saved: the step that was resumed from. certificate: of the resumed process. unlogged:
    metrics that the script's policies go by and the uninterrupted run did not log, and which policies do."""

    verdict: Verdict
    saved: int
    last: int
    leaves: int
    lives: tuple[Life, ...]
    certificate: Mapping[str, Any]
    uncovered: tuple[str, ...]
    unlogged: Mapping[str, str]
    seconds: float


@dataclass
class Certifier:
    """Runs `command` in `place`, an empty directory, with everything that is meant for `where` going there instead."""

    where: str
    command: Sequence[str]
    place: Path
    steps: int
    more: int
    patience_s: float
    tell: Tell = lambda what, done, total: None
    launch: Launch = launch

    def run(self) -> Certification:
        """Raises ScriptFailed and DeadlineExceeded, with the tail of the script's output."""
        try:
            return self._run()
        finally:
            free_shared_memory()  # of those that were killed

    def _run(self) -> Certification:
        began = time.monotonic()
        last = self.steps + self.more
        self._lives: list[Life] = []
        whole = self._life(WHOLE, "whole", last)
        interrupted = self._life(INTERRUPTED, "resumed", last, save_at=self.steps)
        resumed = self._life(RESUMED, "resumed", last)
        trails = Trails(whole, interrupted, resumed)
        if differs(trails):
            trails = Trails(whole, interrupted, resumed, self._life(REPEATED, "repeated", last))
        return Certification(
            verdict=judge(trails),
            saved=self._saved,
            last=resumed.reached,
            leaves=len(resumed.rows[-1].entries) if resumed.rows else 0,
            lives=tuple(self._lives),
            certificate=resumed.certificate,
            uncovered=resumed.uncovered,
            unlogged={
                metric: by for metric, by in whole.certificate.get("watches", {}).items() if metric not in whole.logged
            },
            seconds=time.monotonic() - began,
        )

    def _life(self, name: str, repository: str, last: int, *, save_at: int | None = None) -> Trail:
        number = len(self._lives) + 1
        order = order_of(
            self.where,
            str(self.place / f"checkpoints-{repository}"),
            str(self.place / f"trail-{number}.jsonl"),
            last=last,
            save_at=save_at,
        )
        script = Script(
            name,
            self.command,
            order,
            self.place / f"output-{number}.txt",
            self.patience_s,
            lambda step: self.tell(name, step, last),
            self.launch,
        )
        self.tell(name, 0, last)
        trail = script.run()
        if script.saved is not None:
            self._saved = script.saved
        self._lives.append(Life(name, trail.began or 0, trail.reached, script.seconds, script.saved is not None))
        return trail
