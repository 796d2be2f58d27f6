"""Where the lines of training of several runs are drawn: a track for each run, and one for each line left behind.

Steps run from left to right on one scale for all runs, as a share of the width, so that texts keep their size on any
screen; tracks lie below each other, in pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Literal, get_args

from tenuto.record import record
from tenuto.units import count

if TYPE_CHECKING:
    from tenuto.model.ids import CheckpointId
    from tenuto.report.facts import CheckpointReport, RunReport

Shape = Literal["dot", "left", "begin", "tagged", "damaged", "latest"]
"""In the order of drawing: what counts most lies on top."""

LEFT_BEHIND: Final = 6
"""Of a run's lines that were left behind, how many of the newest are drawn."""
APART: Final = 0.7
"""Checkpoints that lie closer than this share of the width (in per cent) are one dot."""
LABELS_APART: Final = 16.0
"""The same for tags whose names are written there; all are in the words below."""
_TOP, _TRACK, _BRANCH = 44, 24, 22
"""Pixels above a run's line for its name, below it, and for each line that was left behind."""
_LEFT, _RIGHT = 2.0, 96.0


@record
class Segment:
    """A piece of a line. x1, x2: per cent of the width. kind: on the line to the latest, left behind, or the way from a
    checkpoint to what was resumed from it."""

    x1: float
    x2: float
    y1: float
    y2: float
    kind: Literal["line", "behind", "branch", "fork"]


@record
class Mark:
    x: float
    y: float
    shape: Shape
    text: str = ""
    """What is written beside it."""
    title: str = ""
    """What it is, for a pointer that rests on it and for readers of the screen."""


@record
class Drawing:
    """names: of runs, with their y. ticks: steps and their x."""

    height: float
    segments: tuple[Segment, ...]
    marks: tuple[Mark, ...]
    names: tuple[tuple[str, str, float], ...]
    ticks: tuple[tuple[str, float], ...]


def drawing(runs: Sequence[RunReport]) -> Drawing | None:
    """Returns the drawing; None where there is no checkpoint."""
    steps = [one.id.step for run in runs for one in run.checkpoints]
    if not steps:
        return None
    low, high = min(steps), max(steps)

    def x(step: int) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (step - low) / max(high - low, 1)

    places: dict[CheckpointId, tuple[float, float]] = {}
    tracks: dict[str, float] = {}
    segments: list[Segment] = []
    marks: list[Mark] = []
    names = []
    y = 4.0
    for run in _parents_first(runs):
        y += _TOP
        attempts = len({one.id.attempt for one in run.checkpoints})
        names.append((run.run, f"{count(len(run.checkpoints), 'checkpoint')}, {count(attempts, 'attempt')}", y - 26))
        tracks[run.run] = y
        behind = 0
        for stretch in _stretches(run):
            on_line = stretch[0].on_line
            behind += not on_line
            at = y if on_line else y + _BRANCH * behind
            places |= {one.id: (x(one.id.step), at) for one in stretch}
            start, end = x(stretch[0].id.step), x(stretch[-1].id.step)
            parent = _parent(run, stretch)
            if parent is not None and parent.run in tracks:
                # Where retention has removed it, the place on its run's track at which it was.
                px, py = places.get(parent, (x(min(max(parent.step, low), high)), tracks[parent.run]))
                kind = "fork" if parent.run != run.run else "line" if on_line and py == at else "branch"
                if py != at:
                    segments.append(Segment(px, px, py, at, "fork" if kind == "fork" else "branch"))
                segments.append(Segment(px, start, at, at, "line" if on_line else "behind"))
                if on_line and kind == "line":
                    marks.append(
                        Mark(px, at, "begin", "", f"attempt {stretch[0].id.attempt} resumed from step {parent.step:,}")
                    )
            segments.append(Segment(start, end, at, at, "line" if on_line else "behind"))
            marks += _marks(stretch, x, at)
        y += _TRACK + _BRANCH * behind
    ticks = tuple((f"{step:,}", x(step)) for step in _round_steps(low, high))
    marks.sort(key=lambda mark: get_args(Shape).index(mark.shape))
    return Drawing(y + 18, tuple(segments), tuple(marks), tuple(names), ticks)


def events(runs: Sequence[RunReport]) -> Iterator[str]:
    """Yields what happened, in words: forks, lines that were left behind, and what is tagged."""
    for run in runs:
        first = next((one for one in run.attempts if one.parent is not None and one.parent.run != run.run), None)
        if first is not None and first.parent is not None:
            yield f"Run {run.run} was forked from run {first.parent.run} at step {first.parent.step:,}."
        for stretch in _stretches(run, most=None):
            if not stretch[0].on_line:
                back = _parent(run, stretch)
                to = f" back to step {back.step:,}" if back is not None else ""
                yield (
                    f"Run {run.run} went{to} from step {stretch[-1].id.step:,} of attempt {stretch[0].id.attempt}: "
                    f"{count(len(stretch), 'checkpoint')} left behind."
                )
        tagged = [f"{name} is step {one.id.step:,}" for one in run.checkpoints for name in one.tags]
        if tagged:
            yield f"Tags of run {run.run}: {', '.join(tagged)}."


def _parents_first(runs: Sequence[RunReport]) -> list[RunReport]:
    """Returns the runs so that each stands below the one that it was forked from; else in the order given."""
    by_name = {run.run: run for run in runs}
    ordered: dict[str, RunReport] = {}

    def add(run: RunReport, above: frozenset[str]) -> None:
        for attempt in run.attempts:
            origin = attempt.parent.run if attempt.parent is not None else run.run
            if origin in by_name and origin not in above:
                add(by_name[origin], above | {run.run, origin})
        ordered.setdefault(run.run, run)

    for run in runs:
        add(run, frozenset({run.run}))
    return list(ordered.values())


def _stretches(run: RunReport, most: int | None = LEFT_BEHIND) -> list[list[CheckpointReport]]:
    """Returns what each attempt has on the line, and what of it was left behind, the newest `most`: oldest first."""
    by_key: dict[tuple[int, bool], list[CheckpointReport]] = {}
    for one in run.checkpoints:
        by_key.setdefault((one.id.attempt, not one.on_line), []).append(one)
    behind = [key for key in by_key if key[1]]
    dropped = set(behind[: max(len(behind) - most, 0)]) if most is not None else set()
    return [found for key, found in sorted(by_key.items()) if key not in dropped]


def _parent(run: RunReport, stretch: Sequence[CheckpointReport]) -> CheckpointId | None:
    """Returns the checkpoint before a stretch: the attempt's one before it, else what the attempt resumed from."""
    first = stretch[0]
    before = [one for one in run.checkpoints if one.id.attempt == first.id.attempt and one.id.step < first.id.step]
    if before:
        return before[-1].id
    return next((one.parent for one in run.attempts if one.number == first.id.attempt), None)


def _marks(stretch: Sequence[CheckpointReport], x: Callable[[int], float], y: float) -> Iterator[Mark]:
    last = labelled = -100.0
    for one in stretch:
        at, what = x(one.id.step), str(one.id)
        if one.damaged:
            yield Mark(at, y, "damaged", "", f"{what}: damaged")
        elif one.latest:
            yield Mark(at, y, "latest", "", f"{what}: latest")
        elif one.tags:
            text = ", ".join(one.tags) if at - labelled >= LABELS_APART else ""
            labelled = at if text else labelled
            yield Mark(at, y, "tagged", text, f"{what}: tagged {', '.join(one.tags)}")
        elif at - last >= APART:
            yield Mark(at, y, "dot" if one.on_line else "left", "", what)
            last = at


def _round_steps(low: int, high: int) -> list[int]:
    """Returns about five round numbers between two steps."""
    rough = max((high - low) / 6, 1)
    base = 10 ** (len(str(int(rough))) - 1)
    unit = next(base * factor for factor in (1, 2, 5, 10) if base * factor >= rough)
    return list(range(-(-low // unit) * unit, high + 1, unit))[:8]
