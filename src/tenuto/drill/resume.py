"""The second half of a drill: the user's own script trains on from a copy of the checkpoint, and what it logs is
compared with what the later checkpoints of the same line have recorded."""

from __future__ import annotations

import math
import os
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tenuto.certify.probe import order_of
from tenuto.certify.runner import Process, Script, launch
from tenuto.drill.restore import Failure
from tenuto.engine.staging.arena import free_shared_memory
from tenuto.errors import CheckpointNotFound, CorruptionError, DeadlineExceeded, ScriptFailed, UsageError
from tenuto.maintenance.checkpoint_copy import execute, plan_copies
from tenuto.model.ids import CheckpointId
from tenuto.record import record
from tenuto.repo.lineage import walk
from tenuto.repo.repository import Repo

REPOSITORY = "TENUTO_WHERE"
"""The variable that tells a script, and commands that it runs, which repository is meant."""

Recorded = Mapping[int, Mapping[str, float]]
"""Metrics by step."""


@record
class ComparedMetric:
    """A metric at one step: as a later checkpoint has recorded it, and as the script has logged it now; None where it
    has not."""

    step: int
    metric: str
    recorded: float
    logged: float | None
    equal: bool


@record
class Resume:
    """What the script did. began: the step that it resumed at. steps: how many it trained. compared: the metrics, in
    the order of steps. failure: why there is nothing to compare."""

    command: tuple[str, ...]
    began: int
    steps: int
    seconds: float
    compared: tuple[ComparedMetric, ...] = ()
    failure: Failure | None = None

    @property
    def ok(self) -> bool:
        """Returns whether all metrics that were recorded came again."""
        return self.failure is None and all(one.equal for one in self.compared)


def later_metrics(repo: Repo, id: CheckpointId, names: Sequence[str] = ()) -> dict[int, dict[str, float]]:
    """Returns the metrics that later checkpoints of the line have logged with their steps, by step. `names`: only
    these. The line is that of `latest`, or where `id` was left behind, its own attempt's."""
    line: list[CheckpointId] = []
    for one in walk(repo, id.run):
        if one == id:
            break
        line.append(one)
    else:
        line = [CheckpointId(id.run, id.attempt, step) for step in repo.committed(id.run, id.attempt)]
    found: dict[int, dict[str, float]] = {}
    for one in line:
        if one.step <= id.step:
            continue
        try:
            logged = repo.manifest(one).metrics
        except (CheckpointNotFound, CorruptionError):
            continue  # another drill's matter: here it is only a yardstick
        metrics = {name: value for name, value in logged.items() if not names or name in names}
        if metrics:
            found[one.step] = metrics
    return dict(sorted(found.items()))


def steps_to_train(id: CheckpointId, recorded: Recorded, wanted: int | None) -> int:
    """Returns for how many steps to train: as many as are wanted, else up to the first that something was recorded
    of. Raises UsageError where nothing could be compared."""
    last = None if wanted is None else id.step + wanted
    reached = [step for step in recorded if last is None or step <= last]
    if not reached:
        where = f"in the {wanted} steps after {id}" if recorded else f"after {id}"
        raise UsageError(
            f"no checkpoint of the line has recorded a metric {where}: there is nothing to compare",
            subject=str(id),
            hint=f"--steps {min(recorded) - id.step}" if recorded else "name an older checkpoint, one before the last",
        )
    return wanted or min(reached) - id.step


def resume(
    repo: Repo,
    id: CheckpointId,
    command: Sequence[str],
    *,
    recorded: Recorded,
    steps: int,
    tolerance: float,
    patience_s: float,
    on_step: Callable[[int], None] = lambda step: None,
) -> Resume:
    """Runs the script on a copy of the checkpoint, for so many steps.

    The repository itself is not written to: whatever the script's Checkpointer names, the repository or $TENUTO_WHERE,
    is the copy. Nothing that the script saves is kept.
    """
    began = time.perf_counter()
    last = id.step + steps
    with TemporaryDirectory(prefix="tenuto-drill-", dir=_beside(repo.url)) as made:
        place = Path(made).absolute()
        copy = place / "checkpoints"
        execute(repo, plan_copies(repo, [id], to=copy), copy)
        order = order_of(repo.url, str(copy), str(place / "trail.jsonl"), last=last, save_at=None, metrics_only=True)

        def launched(words: Sequence[str], extra: Mapping[str, str], log: Path) -> Process:
            return launch(words, {**extra, REPOSITORY: str(copy)}, log)

        script = Script("resumed", command, order, place / "output.txt", patience_s, on_step, launched, "drilled")
        failure: Failure | None = None
        start = 0
        try:
            start = script.run()[0].began or 0
        except (ScriptFailed, DeadlineExceeded) as error:
            hint = "see that the command trains in this repository by itself; --timeout TIME waits longer for a step"
            failure = Failure(type(error).__name__, error.message, hint, exit_code=error.exit_code)
        finally:
            free_shared_memory()
        logged = script.metrics
    if failure is None and start != id.step:
        failure = Failure(
            "ScriptFailed",
            f"the script began at step {start}, and not from the checkpoint, step {id.step}",
            f"its Checkpointer has to train run {id.run!r}, and to resume from the latest checkpoint",
            exit_code=ScriptFailed.exit_code,
        )
    compared = () if failure is not None else tuple(compare(recorded, logged, last, tolerance))
    return Resume(tuple(command), start, steps, time.perf_counter() - began, compared, failure)


def _beside(where: str) -> Path | None:
    """Returns the directory around a local repository: its disk has room for checkpoints. None where it cannot be
    written to, for the system's directory of temporary files."""
    above = Path(where).parent
    return above if "://" not in where and above.is_dir() and os.access(above, os.W_OK) else None


def compare(recorded: Recorded, logged: Recorded, last: int, tolerance: float) -> list[ComparedMetric]:
    """Compares metrics at equal steps up to `last`: bit for bit, or where `tolerance` is above 0 relative to the larger
    one of the two, and absolute near 0."""
    return [
        ComparedMetric(step, name, value, found := logged.get(step, {}).get(name), _equal(value, found, tolerance))
        for step, metrics in recorded.items()
        if step <= last
        for name, value in sorted(metrics.items())
    ]


def _equal(one: float, other: float | None, tolerance: float) -> bool:
    if other is None:
        return False
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return struct.pack("<d", one) == struct.pack("<d", other) or (
        tolerance > 0 and math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
    )
