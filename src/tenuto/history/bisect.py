"""Finds the first checkpoint on a line of training for which something holds: a condition on its metrics, NaN in its
leaves, or what a command of the user's says of it.

Like every bisection it takes for granted that what holds once holds from then on; `linear` asks every checkpoint.
"""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import numpy as np

from tenuto.codec.statistics import BLOCK_BYTES, examiner_of
from tenuto.engine.read.opened import Leaf, Opened, open_checkpoint
from tenuto.errors import CheckpointNotFound, LeafNotFound, TenutoError, UsageError, did_you_mean, typed
from tenuto.events import Emitter
from tenuto.history.query import FIELDS, Query
from tenuto.model.ids import CheckpointId
from tenuto.model.leaf import Box, dtype
from tenuto.model.records import Manifest, Note
from tenuto.record import record
from tenuto.repo.best import is_healthy, outline
from tenuto.repo.keys import unlock
from tenuto.repo.lineage import line_of
from tenuto.repo.notes import last_of, notes, unread, verification_of, with_notes
from tenuto.repo.refs import list_refs
from tenuto.repo.repository import Repo
from tenuto.state.restore.selection import Selection

Verdict = Literal["good", "bad", "skip"]
"""good: what is looked for does not hold yet. skip: nothing can be said of this checkpoint."""
Test = Callable[[CheckpointId], tuple[Verdict, str]]
"""Returns a verdict on a checkpoint, and what it rests on, in a few words."""
SKIP: Final = 125
"""The exit status by which a command says so, as for `git bisect run`."""
BLOCK: Final = 8 << 20
"""Bytes of a leaf that are looked at together."""


@record
class Trial:
    """What was found of one checkpoint, and why."""

    id: CheckpointId
    verdict: Verdict
    why: str


@record
class Bisection:
    """What a bisection has found.

    first: the first checkpoint for which the test holds; None if it holds for none.
    last_good: the one before it for which it does not, None if it holds from the beginning.
    unsure: checkpoints between the two of which nothing could be said, oldest first: any of them may be the first.
    trials: what was tried, in order. line: how many checkpoints there were to choose from.
    """

    first: CheckpointId | None
    last_good: CheckpointId | None
    unsure: tuple[CheckpointId, ...]
    trials: tuple[Trial, ...]
    line: int


def line_between(repo: Repo, run: str, good: CheckpointId | None, bad: CheckpointId) -> list[CheckpointId]:
    """Returns the checkpoints of the line of training that leads to `bad`, oldest first, from `good` or the oldest on.
    Raises UsageError where `good` is not on it, or `bad` is neither of `run` nor on its line."""
    line = list(line_of(repo, run, bad))[::-1]
    if not line:
        raise UsageError(
            f"{bad} is not on the line of training of run {run!r}",
            subject=str(bad),
            hint=f"{typed('tenuto', 'log', repo.url, '--run', run)} shows the line",
        )
    if good is None:
        return line
    if good == bad or good not in line:
        raise UsageError(
            f"{good} is not on the line of training that leads to {bad}, before it",
            subject=str(good),
            hint=f"{typed('tenuto', 'log', repo.url, '--run', run)} shows the lines",
        )
    return line[line.index(good) :]


def bisect(
    line: Sequence[CheckpointId],
    test: Test,
    *,
    linear: bool = False,
    tried: Callable[[Trial, int], object] | None = None,
) -> Bisection:
    """Finds the first of `line` (oldest first) for which `test` says bad. Its ends are tried first: where the first is
    bad that is the answer, where the last is good there is none. What is skipped is replaced by its neighbours.

    `tried(trial, left)` is called after each trial, with the number of checkpoints still in question. Raises what
    `test` raises. A checkpoint that is removed meanwhile is skipped.
    """
    trials: dict[int, Trial] = {}

    def ask(place: int, left: int) -> Verdict:
        if place not in trials:
            try:
                verdict, why = test(line[place])
            except CheckpointNotFound:
                verdict, why = "skip", "it was removed meanwhile"
            trials[place] = Trial(line[place], verdict, why)
            if tried is not None:
                tried(trials[place], left)
        return trials[place].verdict

    def found(low: int, high: int | None) -> Bisection:
        between = range(low + 1, len(line) if high is None else high)
        unsure = tuple(line[place] for place in between) if high is not None else ()
        first, good = (None if high is None else line[high]), (line[low] if low >= 0 else None)
        return Bisection(first, good, unsure, tuple(trials.values()), len(line))

    places = range(len(line))
    if linear:
        low = -1
        for place in places:
            verdict = ask(place, len(line) - place - 1)
            if verdict == "bad":
                return found(low, place)
            low = place if verdict == "good" else low
        return found(low, None)
    low = next((place for place in places if ask(place, len(line)) != "skip"), -1)
    if low < 0 or trials[low].verdict == "bad":
        return found(-1, low if low >= 0 else None)
    high = next(place for place in reversed(places) if ask(place, place - low) != "skip")
    if trials[high].verdict == "good":
        return found(high, None)
    while True:
        middle = (low + high) // 2
        order = sorted(range(low + 1, high), key=lambda place: abs(place - middle))
        tested = next((place for place in order if ask(place, high - low - 1) != "skip"), None)
        if tested is None:
            return found(low, high)
        low, high = (tested, high) if trials[tested].verdict == "good" else (low, tested)


# --------------------------------------------------------------------------------------------------
# What is asked of a checkpoint.


_OF_REFS: Final = frozenset({"tag", "pinned", "held"})
_FIELDS: Final = FIELDS.keys() - {"line", "best", "age"}
"""The fields of a condition that one checkpoint has by itself."""


def by_query(repo: Repo, text: str) -> Test:
    """Returns the test of a condition such as `loss > 3`: bad where it holds. A checkpoint without a metric that it
    names, or with NaN for it, is skipped. Raises UsageError for what is no condition."""
    query = Query.parse(text)
    metrics = [name for name in query.names if name not in FIELDS]
    unknown = [name for name in query.names if name in FIELDS and name not in _FIELDS]
    if unknown:
        raise UsageError(
            f"{unknown[0]} is not of one checkpoint alone, or changes with time: nothing to find the first one by",
            subject=unknown[0],
            hint=f"there are metrics, and {', '.join(sorted(_FIELDS))}",
        )
    tags: dict[CheckpointId, list[str]] = {}
    kinds: dict[CheckpointId, set[str]] = {}
    for ref in list_refs(repo) if _OF_REFS & set(query.names) else ():
        kinds.setdefault(ref.id, set()).add(ref.kind)
        if ref.kind == "tag":
            tags.setdefault(ref.id, []).append(ref.name)

    def test(id: CheckpointId) -> tuple[Verdict, str]:
        manifest = outline(repo, id)
        if manifest is None:
            return "skip", "its manifest cannot be read"
        noted = notes(repo, id)
        found = with_notes(manifest.metrics, noted)
        why = ", ".join(f"{name} {found[name]:.4g}" for name in metrics if name in found)
        lacking = [name for name in metrics if math.isnan(found.get(name, math.nan))]
        if lacking:
            return "skip", f"{lacking[0]} is {'nan' if lacking[0] in found else 'not logged'}"
        row = {**found, **_row(manifest, noted), "tag": tuple(tags.get(id, ()))}
        row |= {"pinned": "pin" in kinds.get(id, ()), "held": "hold" in kinds.get(id, ())}
        return ("bad" if query.matches(row) else "good"), why

    return test


def _row(manifest: Manifest, noted: Sequence[Note]) -> dict[str, Any]:
    """Returns _FIELDS of a checkpoint, but those that refs say."""
    state = verification_of(noted)
    return {
        "run": manifest.id.run,
        "attempt": manifest.id.attempt,
        "step": manifest.id.step,
        "size": manifest.bytes,
        "stored": manifest.stored_bytes,
        "leaves": manifest.leaves,
        "ranks": len(manifest.indexes),
        "created": manifest.created,
        "verified": state == "verified",
        "proven": state != "suspect" and last_of(noted, "proven") is not None,
        "damaged": state == "suspect" or bool(unread(manifest.id, noted)),
        "healthy": state != "suspect" and is_healthy(manifest),
    }


def by_function(holds: Callable[[CheckpointId], bool | None]) -> Test:
    """Returns the test of a function that returns whether it holds, and None where it cannot tell."""

    def test(id: CheckpointId) -> tuple[Verdict, str]:
        found = holds(id)
        return ("skip" if found is None else "bad" if found else "good"), repr(found)

    return test


def by_nan(repo: Repo, pattern: str | None = None) -> Test:
    """Returns the test for NaN in the leaves whose paths match a glob, or in any: bad where there is some. Values are
    read 8 MiB at a time, each chunk verified. Raises LeafNotFound where no leaf matches."""

    unlock(repo)

    def test(id: CheckpointId) -> tuple[Verdict, str]:
        with open_checkpoint(repo, id, rank=None, emitter=Emitter()) as opened:
            for path in _matching(opened, pattern):
                if has_nan(opened[path]):
                    return "bad", f"nan in {path}"
        return "good", "no nan"

    return test


def _matching(opened: Opened, pattern: str | None) -> list[str]:
    selection = Selection(pattern)
    found = [path for path in opened if selection.takes(path)]
    if pattern is not None and not found:
        near = did_you_mean(pattern, opened)
        raise LeafNotFound(
            f"no leaf of {opened.id} matches {pattern!r}", subject=pattern, hint=near or "model/* or '*'"
        )
    return found


def has_nan(leaf: Leaf) -> bool:
    """Returns whether a leaf has NaN anywhere. Reads it in slices along its first axis that is longer than 1, of at
    most 8 MiB where one item of that is shorter."""
    examine = examiner_of(leaf.dtype)
    if examine is None or not leaf.nbytes:
        return False
    axis = next((place for place, length in enumerate(leaf.shape) if length > 1), 0)
    length = leaf.shape[axis] if leaf.shape else 1
    step = max(1, BLOCK * length // leaf.nbytes)
    for start in range(0, length, step):
        offsets, shape = [0] * len(leaf.shape), list(leaf.shape)
        if shape:
            offsets[axis], shape[axis] = start, min(step, length - start)
        raw = np.empty(math.prod(shape) * dtype(leaf.dtype).size, np.uint8)
        leaf.read_into(raw, Box(tuple(offsets), tuple(shape)))
        if any(examine(raw[at : at + BLOCK_BYTES], False).nan for at in range(0, len(raw), BLOCK_BYTES)):
            return True
    return False


def by_command(repo: Repo, words: Sequence[str]) -> Test:
    """Returns the test that a command makes: exit status 0 is good, 125 skips, anything else up to 127 is bad. In its
    words `{where}` and `{step}` are replaced; it finds the same in TENUTO_WHERE and TENUTO_STEP. A step is such as
    `gpt/a0002/500`. What it prints goes to stderr.

    Raises UsageError for a command that cannot be started, TenutoError for one that a signal has ended or that exits
    with 128 or more.
    """

    def test(id: CheckpointId) -> tuple[Verdict, str]:
        replaced = [word.replace("{where}", repo.url).replace("{step}", str(id)) for word in words]
        environment = {**os.environ, "TENUTO_WHERE": repo.url, "TENUTO_STEP": str(id)}
        try:
            status = subprocess.run(replaced, env=environment, stdout=2, check=False).returncode
        except OSError as error:
            raise UsageError(
                f"{words[0]} cannot be started: {error.strerror}",
                subject=words[0],
                hint="the command follows `--`, as in: -- python evaluate.py {step}",
            ) from error
        if status < 0 or status > 127:
            ended = f"was ended by signal {-status}" if status < 0 else f"left with exit status {status}"
            raise TenutoError(
                f"{words[0]} {ended} on {id}, which says nothing of the checkpoint",
                subject=str(id),
                hint=f"exit status 0: good, 1 to 127: bad, {SKIP}: skip",
            )
        return ("good" if status == 0 else "skip" if status == SKIP else "bad"), f"exit status {status}"

    return test
