"""Checkpoints of one training beside each other: `checkpoint-100/`, `epoch=3-step=400.ckpt`, `step_500/`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tenuto.errors import UsageError
from tenuto.formats.registry import Format, check_present, detect, formats, named
from tenuto.record import record

_NUMBERS: Final = (
    re.compile(r"(?:global_?)?step[-_=]?0*(\d{1,18})", re.I),
    re.compile(r"(?:iter(?:ation)?|checkpoint|ckpt)[-_=]?0*(\d{1,18})", re.I),
    re.compile(r"^0*(\d{1,18})$"),
    re.compile(r"epoch[-_=]?0*(\d{1,18})", re.I),
)
"""What tells the step in a name; the first one that is found counts."""
_INNER: Final = re.compile(r"global_?step", re.I)
"""Directories that lie inside of a checkpoint (DeepSpeed's in Hugging Face's), and are none of a series then."""


@record
class Found:
    """A foreign checkpoint. `number`: the step that its name tells."""

    path: Path
    format: Format
    number: int | None


def find(path: Path, format: str | None = None) -> list[Found]:
    """Returns the checkpoint at `path`, or those in it, if it is a directory of several, by number.

    format: the only one to look for. Raises StoreError if nothing is there, UsageError if no checkpoint is.
    """
    check_present(path)
    wanted = None if format is None else named(format)
    own = _format(path, wanted)
    if path.is_dir():
        inside = sorted(_inside(path, wanted, own), key=lambda one: (one.number is None, one.number, one.path.name))
        if any(one.number is not None for one in inside):
            return inside
    if own is None:
        known = ", ".join(one.name for one in formats() if one.reads)
        raise UsageError(
            f"{path} is not a checkpoint of a known format: {known}"
            if wanted is None
            else f"{path} is not of the format {wanted.name}, nor has it checkpoints that are",
            subject=str(path),
            hint="--from NAME, if it is one of them" if wanted is None else "leave --from out",
        )
    return [Found(path, own, _number(path))]


def passed_over(source: Path, found: list[Found]) -> list[Path]:
    """Returns what lies in a directory of several checkpoints under a number that no checkpoint found there has: it is
    of no format that is known, or not of the one that was asked for."""
    if not source.is_dir() or any(one.path == source for one in found):
        return []
    numbers, paths = {one.number for one in found}, {one.path for one in found}
    return sorted(
        child
        for child in source.iterdir()
        if child not in paths and not child.name.startswith(".") and _number(child) not in (None, *numbers)
    )


def _format(path: Path, wanted: Format | None) -> Format | None:
    found = detect(path) if wanted is None else wanted if wanted.detects(path) else None
    return found if found is not None and found.reads else None


def _inside(path: Path, wanted: Format | None, own: Format | None) -> Iterator[Found]:
    for child in path.iterdir():
        number = _number(child)
        if child.name.startswith(".") or (number is None and child.is_dir()):
            continue
        if own is not None and (number is None or _INNER.match(child.name)):
            continue
        found = _format(child, wanted)
        if found is not None:
            yield Found(child, found, number)


def _number(path: Path) -> int | None:
    name = path.name if path.is_dir() else path.name.removesuffix(path.suffix)
    for pattern in _NUMBERS:
        found = pattern.search(name)
        if found:
            return int(found[1])
    return None
