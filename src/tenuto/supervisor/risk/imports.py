"""Brings public failure logs and logs of other monitors into the form of recordings, one for each thing that can fail.

Formats: `backblaze`, the daily drive statistics (date, serial_number, model, capacity_bytes, failure, smart_N_raw …);
`lanl`, the failures of nodes at Los Alamos (System, nodenumz, Prob Started, Prob Fixed, and a column for each cause);
`nvidia-smi`, what `nvidia-smi --query-gpu=timestamp,index,… --format=csv` prints; `journal`, that of `tenuto run`, for
its ends alone.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import Any, Final

from tenuto.errors import UsageError, did_you_mean
from tenuto.regular_files import opener
from tenuto.supervisor.detectors.contract import END, Sample

DAY_S: Final = 86_400.0
_LANL_CAUSES: Final = ("Facilities", "Hardware", "Human Error", "Network", "Undetermined", "Software")
_NUMBER: Final = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s*([A-Za-z%/]*)\s*")
"""A number, perhaps with a unit behind it, as in `1234 MiB`."""
_OURS: Final = {
    "temperature.gpu": "temperature", "ecc.errors.uncorrected.volatile.total": "ecc_uncorrectable",
    "memory.free": "memory_free_bytes", "memory.total": "memory_total_bytes", "utilization.gpu": "utilization",
    "power.draw": "power_w",
}  # fmt: skip
"""What the detector of GPUs calls the values of a query."""
_HINT: Final = "tenuto risk import --help names the formats; -o says where to"
Row = Mapping[str, str]
Found = tuple[str, Sample]
"""The thing that a sample is of, and the sample."""


def import_log(path: Path, name: str) -> dict[str, list[Sample]]:
    """Returns the samples of a log by the thing that they are of, each in the order of their times. Raises UsageError
    for a format that there is not, and for a file that is of another one."""
    if name not in FORMATS:
        raise UsageError(
            f"there is no format {name!r}, but {', '.join(FORMATS)}",
            subject=name,
            hint=did_you_mean(name, FORMATS) or "tenuto risk import --format backblaze FILE -o DIRECTORY",
        )
    read, columns = FORMATS[name]
    found: dict[str, list[Sample]] = {}
    try:
        with open(path, encoding="utf-8", errors="replace", newline="", opener=opener) as file:
            for thing, sample in read(_rows(file, columns) if columns else ({"": line} for line in file)):
                found.setdefault(thing, []).append(sample)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", subject=str(path), hint=_HINT) from None
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise UsageError(f"{path} is not a log of {name}: {error}", subject=str(path), hint=_HINT) from None
    if not found:
        raise UsageError(f"{path} has nothing that could be imported as {name}", subject=str(path), hint=_HINT)
    return {thing: sorted(samples, key=lambda one: one.at) for thing, samples in found.items()}


def _rows(file: Any, columns: Sequence[str]) -> Iterator[Row]:
    reader = csv.DictReader(file, skipinitialspace=True, restval="")
    header = [(name or "").strip() for name in reader.fieldnames or ()]
    missing = [name for name in columns if not any(one.split(" [")[0] == name for one in header)]
    if missing:
        raise ValueError(f"it lacks the column {', '.join(missing)}")
    for row in reader:
        yield {str(name).strip().split(" [")[0]: value for name, value in row.items() if isinstance(value, str)}


def _backblaze(rows: Iterator[Row]) -> Iterator[Found]:
    """A row is a drive on a day; `failure` is 1 on its last day."""
    for row in rows:
        at = datetime.fromisoformat(row["date"]).replace(tzinfo=UTC).timestamp()
        values = {name: float(value) for name, value in row.items() if name.startswith("smart_") and value.strip()}
        yield (
            row["serial_number"],
            Sample(at, "disk", {name: one for name, one in values.items() if math.isfinite(one)}),
        )
        if row["failure"].strip() == "1":
            yield row["serial_number"], Sample(at + DAY_S, END, {}, "device")


def _lanl(rows: Iterator[Row]) -> Iterator[Found]:
    """A row is a failure of a node, from `Prob Started` to `Prob Fixed`, in minutes of no stated zone. There is nothing
    but failures, so each comes back with a sample that the node runs."""
    for row in rows:
        node = f"{row['System'].strip()}-{row['nodenumz'].strip()}"
        cause = next((one for one in _LANL_CAUSES if row.get(one, "").strip()), "Undetermined")
        kind = {"Hardware": "device", "Network": "hung", "Software": "failed"}.get(cause, "killed")
        yield node, Sample(_minute(row["Prob Started"]), END, {}, kind)
        if row["Prob Fixed"].strip():
            yield node, Sample(_minute(row["Prob Fixed"]), "node", {"up": 1.0})


def _minute(text: str) -> float:
    form = "%m/%d/%Y %H:%M" if re.search(r"/\d{4} ", text) else "%m/%d/%y %H:%M"
    return datetime.strptime(text.strip(), form).replace(tzinfo=UTC).timestamp()


def _nvidia_smi(rows: Iterator[Row]) -> Iterator[Found]:
    """A row is a GPU at a time of this machine's zone. Values have the names of the detector of GPUs, or the query's,
    with underscores for dots; what is no number, such as `[N/A]`, is left out."""
    for row in rows:
        at = datetime.strptime(row["timestamp"].strip(), "%Y/%m/%d %H:%M:%S.%f").astimezone(_local()).timestamp()
        thing = row.get("index", "0").strip()
        values = {
            f"{thing}.{_OURS.get(name, name.replace('.', '_'))}": float(match[1])
            * (1 << 20 if match[2] == "MiB" else 1)
            for name, value in row.items()
            if name not in ("timestamp", "index") and (match := _NUMBER.fullmatch(value))
        }
        yield "gpus", Sample(at, "gpu", values)


def _local() -> tzinfo | None:
    return datetime.now().astimezone().tzinfo


def _journal(rows: Iterator[Row]) -> Iterator[Found]:
    """A line that was cut off is passed over, as `tenuto report` does."""
    for row in rows:
        try:
            line = json.loads(row[""])
        except ValueError:
            if row[""].startswith("{"):
                continue
            raise
        if line["event"] in ("died", "left"):
            yield "job", Sample(datetime.fromisoformat(line["time"]).timestamp(), END, {}, line["kind"])


FORMATS: Final[Mapping[str, tuple[Callable[[Iterator[Row]], Iterator[Found]], Sequence[str]]]] = {
    "backblaze": (_backblaze, ("date", "serial_number", "failure")),
    "lanl": (_lanl, ("System", "nodenumz", "Prob Started", "Prob Fixed")),
    "nvidia-smi": (_nvidia_smi, ("timestamp",)),
    "journal": (_journal, ()),
}
"""What reads a format, and the columns that it must have."""
