"""Which runs nobody trains on now: judged by the process where this host can tell, else by watching the lease."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.errors import CorruptionError
from holdfast.model.names import CheckpointId
from holdfast.repo.repository import Repo
from holdfast.repo.watch import Watch

Finished = Mapping[str, int]
"""Run to the number of its highest attempt, for the runs whose owner was found dead. Once dead, an attempt stays so; a
higher number seen later is a new owner."""

_POLL_S = 0.5


def finished_runs(repo: Repo, runs: Iterable[str], watches: Iterable[Watch] = ()) -> dict[str, int]:
    """Looks at the owner of each run. Takes as long as a lease's ttl (15 s) where an owner lived on another host and
    has not released its lease; else no time. `watches`: begun earlier, or with a clock of the caller's."""
    begun = {watch.run: watch for watch in watches}
    waiting = [begun.get(run) or Watch(repo, run) for run in runs]
    found: dict[str, int] = {}
    while waiting:
        again = []
        for watch in waiting:
            seen = watch.look()
            if seen.verdict == "dead":
                found[watch.run] = seen.number
            elif seen.verdict == "unknown":
                again.append(watch)
        if again:
            again[0].clock.sleep(_POLL_S)
        waiting = again
    return found


def is_finished(repo: Repo, run: str, finished: Finished) -> bool:
    """Whether the owner that was found dead still is the run's last one."""
    known = finished.get(run)
    return known is not None and not any(_counts(repo, run, n) for n in repo.attempts(run) if n > known)


def may_still_save(repo: Repo, id: CheckpointId, finished: Finished) -> bool:
    """Whether the attempt that `id` lies under may have a save in flight: the run's last one, unless found dead. One
    without a readable record is given the benefit of the doubt."""
    higher = any(_claimed(repo, id.run, n) for n in repo.attempts(id.run) if n > id.attempt)
    return not higher and not is_finished(repo, id.run, finished)


def _claimed(repo: Repo, run: str, number: int) -> bool:
    """Whether this attempt certainly was claimed."""
    try:
        return repo.find_attempt(run, number) is not None
    except CorruptionError:
        return False


def _counts(repo: Repo, run: str, number: int) -> bool:
    """Whether this attempt may have been claimed; a directory that is a copy, or that nobody claimed, was not."""
    try:
        return repo.find_attempt(run, number) is not None
    except CorruptionError:
        return True
