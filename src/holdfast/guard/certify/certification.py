"""The certification: the script run whole, then killed and resumed, and only where they differ run whole once more."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from holdfast.errors import ScriptFailed
from holdfast.guard.certify.order import order_of
from holdfast.guard.certify.script import Launch, Script, launch
from holdfast.image.arena import free_shared_memory
from holdfast.model.trail import Trail
from holdfast.policy.exactness.verdict import Trails, Verdict, differs, judge, worst

WHOLE: Final = "uninterrupted"
INTERRUPTED: Final = "to be killed"
RESUMED: Final = "resumed"
REPEATED: Final = "uninterrupted again"

Tell = Callable[[str, int, int], None]
"""Told how far it is: which run, steps completed, steps wanted."""


@dataclass(frozen=True, slots=True)
class Life:
    """One run of the script: the steps that its processes began and ended at."""

    name: str
    began: int
    reached: int
    seconds: float
    killed: bool


@dataclass(frozen=True, slots=True)
class Certification:
    """What was done and found. saved: the step that was resumed from. ranks: the processes that trained together; what
    was compared after each step, and found not to be in the state, is that of all. certificate: of the resumed process,
    the first rank's. unlogged: metrics that the script's policies go by and the uninterrupted run did not log, and
    which policies do."""

    verdict: Verdict
    saved: int
    last: int
    ranks: int
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
        self._ranks = 0
        whole = self._life(WHOLE, "whole", last)
        interrupted = self._life(INTERRUPTED, "resumed", last, save_at=self.steps)
        resumed = self._life(RESUMED, "resumed", last)
        trails = [Trails(*lives) for lives in zip(whole, interrupted, resumed, strict=True)]
        if any(map(differs, trails)):
            repeated = self._life(REPEATED, "repeated", last)
            trails = [replace(one, repeated=again) for one, again in zip(trails, repeated, strict=True)]
        return Certification(
            verdict=worst([judge(one) for one in trails]),
            saved=self._saved,
            last=min(one.reached for one in resumed),
            ranks=len(resumed),
            leaves=sum(len(one.rows[-1].entries) for one in resumed if one.rows),
            lives=tuple(self._lives),
            certificate=resumed[0].certificate,
            uncovered=tuple(dict.fromkeys(found for one in resumed for found in one.uncovered)),
            unlogged={
                metric: by
                for metric, by in whole[0].certificate.get("watches", {}).items()
                if metric not in whole[0].logged
            },
            seconds=time.monotonic() - began,
        )

    def _life(self, name: str, repository: str, last: int, *, save_at: int | None = None) -> tuple[Trail, ...]:
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
        trails = script.run()
        self._ranks = self._ranks or len(trails)
        if len(trails) != self._ranks:
            raise ScriptFailed(
                f"the script ({name}) ran as {len(trails)} ranks, and as {self._ranks} before",
                subject=name,
                hint="what is compared step by step are the same ranks: let the command start as many each time",
            )
        if script.saved is not None:
            self._saved = script.saved
        began, reached = (min(one) for one in zip(*((one.began or 0, one.reached) for one in trails), strict=True))
        self._lives.append(Life(name, began, reached, script.seconds, script.saved is not None))
        return trails
