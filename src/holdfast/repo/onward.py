"""Claiming a run for one piece of work, to go on from what is its newest checkpoint then."""

from __future__ import annotations

from functools import partial

from holdfast.model.names import CheckpointId
from holdfast.repo.attempts import Attempt, Report, claim
from holdfast.repo.lineage import latest
from holdfast.repo.repository import Repo

CLAIMS = 3
"""How often it is tried where others keep committing."""


class _Newer(Exception):
    """Another checkpoint is the newest by now; no claim was put."""


def claim_onward(
    repo: Repo,
    run: str,
    newest: CheckpointId | None,
    parent: CheckpointId | None,
    *,
    withdrawn: set[int],
    wait_s: float | None = None,
    report: Report | None = None,
) -> Attempt | None:
    """Claims the run, going on from `parent`, if `newest` is what `latest` means both before and after; None where it
    is not, and the claim, if it was put, is given back: the caller looks again. An owner that was waited for commits
    at its end. `withdrawn` and the rest: as `claim`, whose errors it raises.
    """
    try:
        look = partial(_assert_newest, repo, run, newest, withdrawn)
        attempt = claim(repo, run, parent, wait_s=wait_s, report=report, look=look, withdrawn=withdrawn)
    except _Newer:
        return None
    unused = True
    try:
        unused = latest(repo, run, below=attempt.number, withdrawn=withdrawn) != newest
    finally:
        if unused:
            withdrawn.add(attempt.number)
            attempt.release()
    return None if unused else attempt


def _assert_newest(repo: Repo, run: str, newest: CheckpointId | None, withdrawn: set[int]) -> None:
    if latest(repo, run, withdrawn=withdrawn) != newest:
        raise _Newer
