"""The first half of a drill: another process restores, and what it holds is compared with what the index says.

The comparison goes by the digests that the save wrote into the indexes, chunk by chunk, and by the values in the
manifest's tree. Nothing of the process that restores takes part in that but the bytes it holds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

import numpy as np

from tenuto.certify.probe import spelled, spelled_values
from tenuto.concurrency.process_trees import below, end
from tenuto.drill.child import plain_path
from tenuto.errors import TenutoError
from tenuto.model.ids import CheckpointId, attempt_key
from tenuto.model.records import Index, Manifest
from tenuto.record import record
from tenuto.repo.keys import KEY_FILE, KEY_TEXT, PASSPHRASE
from tenuto.repo.repository import Repo
from tenuto.state.encode.flattener import flatten
from tenuto.state.restore import rebuild
from tenuto.state.tree import node_at

PREFIX: Final = "TENUTO_"
KEYS: Final = (KEY_FILE, KEY_TEXT, PASSPHRASE)
"""The variables that a stranger would be given."""
JOB: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
"""Variables that would make the process one of a job."""
POLL_S: Final = 0.01
_TAIL: Final = 12
"""Lines of a process's output that a failure shows."""

What = Literal["missing", "dtype", "shape", "bytes", "value"]


@record
class WrongEntry:
    """An entry of the state that did not come back as it was saved.

    what: which of its properties. saved, restored: that property, in words. rank: of a value of one rank's own.
    """

    path: str
    what: What
    saved: str
    restored: str
    rank: int | None = None

    def __str__(self) -> str:
        whose = "" if self.rank is None else f" of rank {self.rank}"
        match self.what:
            case "missing":
                return f"{self.path}{whose} is missing"
            case "bytes":
                return f"{self.path}{whose} has other bytes: {self.restored}"
            case _:
                return f"{self.path}{whose} has {self.what} {self.restored}, and {self.saved} was saved"


@record
class Failure:
    """Why a drill came to no comparison. kind: an error's name, `Timeout` or `Ended`. damage: whether bytes are not
    what was saved. exit_code: with which `tenuto drill` leaves."""

    kind: str
    message: str
    hint: str | None = None
    damage: bool = False
    exit_code: int = 1


@record
class Restore:
    """What another process restored.

    seconds: from its start until the state was in memory; load_s: of these, in `tenuto.load`.
    bytes: of the state. leaves, values: how many were compared. wrong: those that differ.
    failure: why there is nothing to compare; then `seconds` is how long it took to fail.
    """

    seconds: float
    load_s: float
    bytes: int
    leaves: int
    values: int
    wrong: tuple[WrongEntry, ...] = ()
    failure: Failure | None = None

    @property
    def ok(self) -> bool:
        """Returns whether every leaf and value came back as it was saved."""
        return self.failure is None and not self.wrong

    @property
    def damaged(self) -> bool:
        """Returns whether bytes are not what was saved. An entry that is missing or of another type may as well be the
        fault of a library there."""
        if self.failure is not None:
            return self.failure.damage
        return any(one.what == "bytes" for one in self.wrong)

    @property
    def rate(self) -> float:
        """Returns the bytes of the state per second of `load_s`."""
        return self.bytes / self.load_s if self.load_s > 0 else 0.0


def restore(repo: Repo, id: CheckpointId, where: str, *, timeout_s: float) -> Restore:
    """Restores `id` from `where` in a process of its own, and compares what it holds. Raises CorruptionError where the
    manifest or an index, by which it is judged, cannot be read."""
    manifest = repo.manifest(id)
    indexes = [repo.index(manifest, rank) for rank in range(len(manifest.indexes))]
    order = {
        "where": where,
        "run": id.run,
        "step": f"{attempt_key(id.attempt)}/{id.step}",
        "chunk_bytes": manifest.chunk_bytes,
        "ranks": len(indexes),
        "parts": _parts(indexes),
        "private": [index.rank for index in indexes if any(spec.private for spec in index.specs)],
    }
    with TemporaryDirectory(prefix="tenuto-drill-") as place:
        began = time.monotonic()
        failure = _run(order, Path(place), timeout_s)
        took = time.monotonic() - began
        records = _records(Path(place) / "report.jsonl")
    said = next((one for one in records if one["record"] == "failed"), None)
    if said is not None:
        failure = Failure(
            said["kind"], said["message"], said["hint"], bool(said["damage"]), int(said.get("exit_code", 1))
        )
    loaded = next((one for one in records if one["record"] == "loaded"), None)
    if failure is None and (loaded is None or records[-1]["record"] != "done"):
        failure = Failure("Ended", "the process that restored ended without a word")
    seconds = took if loaded is None else float(loaded["at"]) - began
    load_s = 0.0 if loaded is None else float(loaded["seconds"])
    if failure is not None:
        return Restore(seconds, load_s, manifest.bytes, 0, 0, failure=failure)
    wrong = [*_wrong_leaves(repo, manifest, indexes, records), *_wrong_values(manifest, records)]
    leaves = sum(len(index.specs) for index in indexes)
    return Restore(seconds, load_s, manifest.bytes, leaves, len(spelled_values(manifest.tree)), tuple(wrong))


# --------------------------------------------------------------------------------------------------
# The process.


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a stranger: nothing of Tenuto's but keys, and of no job."""
    return {
        name: value
        for name, value in environment.items()
        if name in KEYS or not (name.startswith(PREFIX) or name in JOB)
    }


def _run(order: Mapping[str, Any], place: Path, timeout_s: float) -> Failure | None:
    """Runs the process to its end. Returns why it came to none by itself."""
    log = place / "output.txt"
    (place / "order.json").write_text(json.dumps({**order, "report": str(place / "report.jsonl")}), "ascii")
    with (place / "order.json").open("rb") as given, log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tenuto.drill.child"],
            stdin=given,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=clean_environment(os.environ),
            cwd=place,
            start_new_session=True,
        )
    deadline = time.monotonic() + timeout_s
    try:
        while process.poll() is None:
            if time.monotonic() > deadline:
                return Failure("Timeout", f"the restore was not done after {timeout_s:g} s", exit_code=17)
            time.sleep(POLL_S)
    finally:
        end(process, below(process.pid))  # also on Ctrl-C, which does not reach it
    if process.returncode == 0:
        return None
    status = process.returncode
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    tail = log.read_text("utf-8", "replace").splitlines()[-_TAIL:]
    said = "; it printed:\n" + "\n".join(f"  | {line}" for line in tail) if tail else ""
    return Failure("Ended", f"the process that restored {how}{said}")


def _records(path: Path) -> list[dict[str, Any]]:
    """Returns the complete lines of the report."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


# --------------------------------------------------------------------------------------------------
# The comparison.


def _parts(indexes: list[Index]) -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Returns the boxes of each leaf that ranks have saved in parts, by its path and by its `plain_path`."""
    found: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for index in indexes:
        for spec in index.specs:
            if spec.offsets is not None and not spec.private:
                for path in {spec.path, plain_path(spec.path)}:
                    found.setdefault(path, []).append((spec.offsets, spec.shape))
    return found


def _wrong_leaves(
    repo: Repo, manifest: Manifest, indexes: list[Index], records: list[dict[str, Any]]
) -> Iterator[WrongEntry]:
    leaves = [one for one in records if one["record"] == "leaf"]
    there: dict[tuple[str, int | None], dict[tuple[int, ...], dict[str, Any]]] = {}
    for one in leaves:
        there.setdefault((one["path"], one["rank"]), {})[tuple(one["at"])] = one
    for one in leaves:  # where no leaf has that very path
        there.setdefault((plain_path(one["path"]), one["rank"]), there[one["path"], one["rank"]])
    for index in indexes:
        for row, spec in enumerate(index.specs):
            rank = index.rank if spec.private else None
            shown = index.rank if spec.private and len(indexes) > 1 else None
            found = there.get((spec.path, rank), there.get((plain_path(spec.path), rank), {}))
            shape = next((tuple(one["shape"]) for one in found.values()), spec.leaf_shape)
            part = found.get(spec.offsets or ())
            if shape != spec.leaf_shape:
                yield WrongEntry(spec.path, "shape", str(spec.leaf_shape), str(shape), shown)
            elif part is None:
                yield WrongEntry(spec.path, "missing", spec.dtype, "nothing", shown)
            elif part["dtype"] != spec.dtype:
                yield WrongEntry(spec.path, "dtype", spec.dtype, part["dtype"], shown)
            else:
                bad = _differing(repo, manifest, index, row, bytes.fromhex(part["digests"]))
                if bad is not None:
                    where = f"first in bytes {bad * manifest.chunk_bytes} and following"
                    yield WrongEntry(spec.path, "bytes", "", where, shown)


def _differing(repo: Repo, manifest: Manifest, index: Index, row: int, found: bytes) -> int | None:
    """Returns the first chunk of a row whose digest is another one; None if there is none."""
    saved = index.digests[int(index.chunk_start[row]) : int(index.chunk_start[row + 1])]
    digests = np.frombuffer(found, np.uint8).reshape(-1, 16)
    if index.sealed is not None:
        assert repo.keys is not None, "who reads a sealed checkpoint has its keys"
        digests = repo.keys.hide(digests, index.sealed, manifest.id.manifest)
    if len(digests) != len(saved):
        return 0
    bad = np.flatnonzero((digests != saved).any(axis=1))
    return int(bad[0]) if len(bad) else None


def _wrong_values(manifest: Manifest, records: list[dict[str, Any]]) -> Iterator[WrongEntry]:
    restored: dict[str, str] = next((one["values"] for one in records if one["record"] == "values"), {})
    plain = {plain_path(path): text for path, text in restored.items()}
    for path, text in spelled_values(manifest.tree).items():
        found = restored.get(path, plain.get(plain_path(path)))
        if found == text or found in _without_class(manifest, path):
            continue
        yield WrongEntry(path, "value" if found is not None else "missing", text, str(found))


def _without_class(manifest: Manifest, path: str) -> tuple[str, ...]:
    """Returns how a value is spelled that comes back without its class, as an enum does where nothing imports it, and
    as an empty module or dataclass is an empty dict then."""
    node = node_at(manifest.tree, path)
    if isinstance(node, Mapping) and not node.get("i", True):
        return ('{"!":"dict","i":[]}',)
    try:
        return tuple(spelled(flatten({"value": rebuild.plain(node)})).values())
    except TenutoError:
        return ()
