"""From recordings to distinct crash states, each judged once.

For every prefix of the calls, every combination of what may be on the disk: all of them where they are few, else a
sample that always holds "all", "nothing" and each single exception. Two states are the same if the disks hold the
same names with the same bytes; one disk is judged again only where more is expected of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from campaigns.persistence import Instant, Persistence
from campaigns.scenarios import Recording
from tenuto.testing.expectations import Expected
from tenuto.testing.recorder import Call, Mark
from tenuto.testing.simulated_disk import DiskImage, SimulatedDisk

Check = Callable[[SimulatedDisk, Expected], list[str]]


@dataclass(frozen=True)
class CrashState:
    """The disk after a crash that followed `prefix` steps of the log. `new`: no disk like it was met before."""

    prefix: int
    choice: tuple[int, ...]
    fingerprint: bytes
    image: DiskImage
    expected: Expected
    instant: Instant
    new: bool


@dataclass(frozen=True)
class Violation:
    """A state that breaks a rule, and the fewest losses that still break it."""

    recording: str
    prefix: int
    last_call: str
    problems: tuple[str, ...]
    lost: tuple[str, ...]

    def __str__(self) -> str:
        lost = "".join(f"\n    {line}" for line in self.lost) or "\n    nothing: all calls so far were on the disk"
        found = "".join(f"\n    {line}" for line in self.problems)
        return f"{self.recording}: crash after call {self.prefix} ({self.last_call})\n  lost:{lost}\n  found:{found}"


def crash_states(
    recording: Recording,
    *,
    each: int,
    seed: int,
    seen: set[bytes],
    judged: set[tuple[bytes, int]] | None = None,
    part: int = 1,
) -> Iterator[CrashState]:
    """Distinct states of one recording, about `each` for every prefix at most. `seen` grows by their fingerprints.
    `part`: only one in so many prefixes is looked at."""
    source = random.Random(f"{recording.name} {seed}")
    persistence = recording.replaying(recording.base)
    expected = Expected.after(recording.opening)
    known: set[tuple[bytes, int]] = set() if judged is None else judged
    epoch = 0
    for prefix, step in enumerate((None, *recording.log)):
        if isinstance(step, Mark):
            expected.add(step)
            epoch += 1
        elif isinstance(step, Call):
            persistence.replay(step, prefix - 1)
        if prefix < recording.start or (prefix + seed) % part:
            continue
        for instant, choice in _possible(persistence, each, source):
            image = instant.image(choice)
            fingerprint = image.fingerprint()
            if (fingerprint, epoch) in known:
                continue
            known.add((fingerprint, epoch))
            new = fingerprint not in seen
            seen.add(fingerprint)
            yield CrashState(prefix, choice, fingerprint, image, expected, instant, new)


def _possible(persistence: Persistence, each: int, source: random.Random) -> Iterator[tuple[Instant, tuple[int, ...]]]:
    for instant in persistence.instants():
        yield from ((instant, choice) for choice in instant.choices(each, source))


def violation(recording: Recording, state: CrashState, problems: Sequence[str], check: Check) -> Violation:
    """Shrinks the losses: whatever can be put back with a rule still broken is put back."""
    choice, found = list(state.choice), list(problems)
    for at, variable in enumerate(state.instant.variables):
        newest = variable.count - 1
        if choice[at] == newest:
            continue
        tried = [*choice[:at], newest, *choice[at + 1 :]]
        still = check(SimulatedDisk.holding(state.instant.image(tried)), state.expected)
        if still:
            choice, found = tried, still
    lost = [
        variable.describe(answer)
        for variable, answer in zip(state.instant.variables, choice, strict=True)
        if answer != variable.count - 1
    ]
    calls = [step for step in recording.log[: state.prefix] if isinstance(step, Call)]
    last = f"{calls[-1].kind} {calls[-1].path}" if calls else "none"
    return Violation(recording.name, state.prefix - 1, last, tuple(found), tuple(lost))
