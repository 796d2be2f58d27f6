"""Reads recordings of what detectors read: JSON lines, one file for each job."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from tenuto.errors import UsageError
from tenuto.regular_files import opener
from tenuto.supervisor.detectors.contract import Sample

_RECORD: Final = "tenuto run --record telemetry.jsonl -- python train.py"
_BEGIN: Final = '{"at": '
"""How each sample's line begins."""


def read_recording(path: Path, newest: int | None = None) -> list[Sample]:
    """Returns the samples of a file in the order of their times, or the last `newest` of them. A line that was cut off,
    by the end of a recorder or a full disk, is left out. Raises UsageError for a file that cannot be read, or is none.
    """
    try:
        with open(path, encoding="utf-8", opener=opener) as file:
            lines = list(deque(enumerate(file, 1), newest))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"{path} cannot be read: {why}", subject=str(path), hint=_RECORD) from None
    found = []
    for number, line in lines:
        try:
            if line.strip():
                found.append(Sample.read(line))
        except ValueError as error:
            if isinstance(error, json.JSONDecodeError) and _BEGIN.startswith(line.rstrip("\n")[: len(_BEGIN)]):
                continue  # the recorder was killed within it
            raise UsageError(
                f"{path}, line {number}: {error}",
                subject=str(path),
                hint=_RECORD,
            ) from None
    return sorted(found, key=lambda sample: sample.at)


def read_all(paths: Sequence[Path]) -> list[list[Sample]]:
    """Returns the samples of each file; of a directory, those of each `*.jsonl` in it. Raises UsageError for none."""
    files = [file for path in paths for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    found = [samples for file in files if (samples := read_recording(file))]
    if not found:
        raise UsageError("there are no samples", hint=_RECORD)
    return found


def write_recording(path: Path, samples: Iterable[Sample]) -> None:
    """Writes samples as a recording. Raises UsageError where that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(f"{sample.line()}\n" for sample in samples)
    except OSError as error:
        hint = "-o DIRECTORY, one that can be written"
        raise UsageError(f"{path} cannot be written: {error.strerror}", subject=str(path), hint=hint) from None
