"""Keeps a job from starting from scratch unheard: an empty directory may be one whose file system is not mounted.

A first run says nothing. Where something tells that there had been a repository (an image in this machine's memory that
names this place, or this process itself), the new one is told of, and refused in a job that was restarted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from tenuto.engine.memory_tier.listing import images
from tenuto.errors import RepositoryError, typed
from tenuto.events import Emitter, Warned
from tenuto.model.ids import CheckpointId, attempt_key
from tenuto.policy.keep import KeepPolicy
from tenuto.store.contract import Store

RESTARTS: Final = ("TENUTO_RESTART", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""Where a launcher says how often it has started this job again."""
_had: Final[set[str]] = set()
"""Places in which this process has had a repository."""


def restarted(environ: Mapping[str, str] = os.environ) -> str:
    """Returns what says that this job was started again, such as `SLURM_RESTART_COUNT=1`; empty if nothing does."""
    return next((f"{name}={environ[name]}" for name in RESTARTS if environ.get(name, "0").strip("0").isdigit()), "")


def opened(url: str) -> None:
    """Remembers that this process has had a repository there."""
    _had.add(url)


def check_new_repository(store: Store, run: str, emitter: Emitter) -> None:
    """Called before a repository is made where training was to resume from the latest checkpoint. Warns if there had
    been one; raises RepositoryError if the job was restarted too."""
    evidence = _evidence(store.url)
    if not evidence:
        return
    again = restarted()
    message = f"there is no repository at {store.url}, and there had been one: {evidence}"
    if again:
        raise RepositoryError(
            f"{message}; this job was started again ({again}) and does not start from scratch by itself",
            subject=store.url,
            hint="is the file system mounted? To start from scratch: resume_from=None",
        )
    emitter.report(
        f"{message}; run {run!r} starts from scratch. Is the file system mounted, or was it removed on purpose?", run
    )


def warn_of_fresh_start(url: str, run: str, emitter: Emitter) -> None:
    """Called where there was nothing to resume from: in a job that was restarted, a person should know."""
    again = restarted()
    if again:
        emitter.report(
            f"this job was started again ({again}), and run {run!r} at {url} has no checkpoint: it starts from scratch",
            run,
        )


def left_behind(url: str, newest: CheckpointId, taken: CheckpointId | None, *, keep: KeepPolicy) -> Warned:
    """Returns what a run says that starts over, or goes back to `taken`: what that leaves, for how long it is kept, and
    how to go back to it. newest: what the run would have resumed from."""
    to = "starts over" if taken is None else f"goes back to step {taken.step}"
    back = f"resume_from='{attempt_key(newest.attempt)}/{newest.step}' goes back to it"
    if keep.keeps_all():
        how_long = f"it is kept; {back}"
    else:
        undelete = typed("tenuto", "undelete", url, newest)
        how_long = f"it is kept until keep= drops it, and then for 24 h in the trash (`{undelete}`); {back}"
    return Warned(f"run {newest.run} {to} and leaves step {newest.step} behind, {newest}: {how_long}", newest.run)


def _evidence(url: str) -> str:
    if url in _had:
        return "this process had it open"
    for found in images(among=lambda slot: True):
        if found.footer is not None and found.footer.where == url:
            return f"step {found.footer.id.step} of run {found.footer.id.run!r} lies in this machine's memory"
    return ""
