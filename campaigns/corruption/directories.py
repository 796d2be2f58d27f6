"""Whole directories in the wrong place: a run, an attempt or a step of another repository laid over one's own, two
steps that changed places, a step laid over another.

Every object in them is whole, and they hang together. Reading gives what was saved under a checkpoint's name, or
refuses; verify says what lies there: an error, but for a step laid over another one, which looks like a person's copy.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from campaigns.corruption.judge import Reading
from campaigns.corruption.shapes import Shape
from tenuto.engine.read.choose import RestoreResult, restore_checkpoint, restore_latest
from tenuto.errors import TenutoError
from tenuto.maintenance.verify import execute, plan_verify
from tenuto.model.ids import CheckpointId

Change = Callable[[Shape, random.Random], str]
"""Returns the directory that is no longer what it was."""


def _lay(shape: Shape, directory: str, objects: Mapping[str, bytes], source: random.Random) -> None:
    """Puts `objects` (name below the directory to bytes) there: in place of what lay there, or over it."""
    if source.random() < 0.5:
        for name in [name for name in shape.place.objects if name.startswith(f"{directory}/")]:
            del shape.place.objects[name]
    for rest, data in objects.items():
        shape.place.objects[f"{directory}/{rest}"] = data, 2


def _below(objects: Mapping[str, bytes], directory: str) -> dict[str, bytes]:
    prefix = len(directory) + 1
    return {name[prefix:]: data for name, data in objects.items() if name.startswith(f"{directory}/")}


def _foreign(depth: int) -> Change:
    def change(shape: Shape, source: random.Random) -> str:
        saved = source.choice(sorted(id for id in shape.saved if _below(shape.twin, id.directory)))
        directory = "/".join(saved.directory.split("/")[:depth])
        _lay(shape, directory, _below(shape.twin, directory), source)
        return directory

    return change


def _two(shape: Shape, source: random.Random) -> tuple[str, str]:
    one, other = source.sample(sorted(shape.saved), 2)
    return one.directory, other.directory


def _swapped(shape: Shape, source: random.Random) -> str:
    one, other = _two(shape, source)
    lay = {one: _below(shape.objects, other), other: _below(shape.objects, one)}
    for name in [name for name in shape.place.objects if name.startswith((f"{one}/", f"{other}/"))]:
        del shape.place.objects[name]
    for directory, objects in lay.items():
        for rest, data in objects.items():
            shape.place.objects[f"{directory}/{rest}"] = data, 2
    return one


def _laid_over(shape: Shape, source: random.Random) -> str:
    one, other = _two(shape, source)
    _lay(shape, one, _below(shape.objects, other), source)
    return one


LAID_OVER: Final = "a step laid over another"
CHANGES: Final[Mapping[str, Change]] = {
    "a run of another repository": _foreign(2),
    "an attempt of another repository": _foreign(3),
    "a step of another repository": _foreign(4),
    "two steps swapped": _swapped,
    LAID_OVER: _laid_over,
}


def displaced(shape: Shape, kind: str, source: random.Random) -> list[str]:
    """Puts directories where they do not belong, judges, and puts all back. Returns what was read wrongly, or not
    said."""
    try:
        directory = CHANGES[kind](shape, source)
        return [f"{kind}, {directory}: {problem}" for problem in _problems(shape, kind, directory)]
    finally:
        shape.heal()


def _problems(shape: Shape, kind: str, directory: str) -> Iterator[str]:
    for run in shape.line:
        found = _read(shape, run)
        yield from found if found is not None else ()
    report = execute(shape.repo, plan_verify(shape.repo))
    for id in sorted(shape.saved):
        found = _read(shape, id)
        if found is not None:
            yield from found
        elif id in report.checked and id not in report.damaged():
            yield f"verify counts {id} as whole, and it cannot be read"
    about = [finding for finding in report.findings if directory in f"{finding.object or ''} {finding.message}"]
    if not about:
        yield "verify reports nothing"
    elif kind != LAID_OVER and not any(finding.severity == "error" for finding in about):
        yield "verify calls it harmless"


def _read(shape: Shape, what: str | CheckpointId) -> list[str] | None:
    """Restores the newest of a run, or a checkpoint. Returns what was read wrongly; None where it was refused."""
    reading = Reading()
    try:
        if isinstance(what, CheckpointId):
            result: RestoreResult | None = restore_checkpoint(shape.repo, what, reading.match)
        else:
            result = restore_latest(shape.repo, what, reading.match)
    except TenutoError:
        return None
    if result is None:
        return [f"{what} starts from scratch, although there were checkpoints"]
    return list(reading.differences(shape, result))
