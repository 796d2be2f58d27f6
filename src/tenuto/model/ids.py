"""Names of runs, attempts, steps and checkpoints, and their directories in a store."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from tenuto.errors import UsageError

_RUN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,99}", re.ASCII)
_ATTEMPT: Final = re.compile(r"a([0-9]{4,18})", re.ASCII)
_STEP: Final = re.compile(r"^step-([0-9]{8}|[1-9][0-9]{8,17})$", re.ASCII | re.MULTILINE)
MAX_STEP: Final = 10**18 - 1


def check_run(name: str) -> str:
    """Returns `name` if it is a valid run name; raises UsageError otherwise."""
    if not isinstance(name, str) or not _RUN.fullmatch(name) or name.endswith("."):
        raise UsageError(
            f"{name!r} cannot name a run",
            subject=str(name),
            hint=(
                "use letters, digits and . _ = -, at most 100, starting with a letter or digit and not ending in a dot"
            ),
        )
    return name


def run_key(run: str) -> str:
    """Returns the directory name of a run: names that differ only in case are one run."""
    return check_run(run).casefold()


def attempt_key(number: int) -> str:
    return f"a{number:04d}"


def step_key(step: int) -> str:
    return f"step-{step:08d}"


def parse_attempt(key: str) -> int | None:
    """Returns the number in an attempt's directory name; None for others, also non-canonical spellings."""
    found = _ATTEMPT.fullmatch(key)
    if not found:
        return None
    number = int(found[1])
    return number if attempt_key(number) == key and number > 0 else None


def parse_step(key: str) -> int | None:
    found = _STEP.fullmatch(key)
    return int(found[1]) if found else None


def parse_steps(keys: Iterable[str]) -> list[int]:
    """Returns the steps among names of directories, descending; one pass, since thousands lie together."""
    return sorted(map(int, _STEP.findall("\n".join(keys))), reverse=True)


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """A checkpoint's identity, independent of its content and time. `run` is the run's directory name."""

    run: str
    attempt: int
    step: int

    def __post_init__(self) -> None:
        if run_key(self.run) != self.run:
            object.__setattr__(self, "run", run_key(self.run))
        if self.attempt < 1 or not 0 <= self.step <= MAX_STEP:
            raise UsageError(f"no checkpoint can be attempt {self.attempt}, step {self.step}", subject=self.run)

    @property
    def directory(self) -> str:
        return f"runs/{self.run}/{attempt_key(self.attempt)}/{step_key(self.step)}"

    @property
    def manifest(self) -> str:
        return f"{self.directory}/manifest.json"

    def __str__(self) -> str:
        return f"{self.run}/{attempt_key(self.attempt)}/{self.step}"
