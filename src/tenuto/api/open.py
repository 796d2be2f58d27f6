"""Opens a checkpoint for inspection; reads only what is requested."""

from __future__ import annotations

from collections.abc import Iterable

from tenuto.engine.read.choose import choose, exactly, report_skipped
from tenuto.engine.read.opened import Opened, open_checkpoint
from tenuto.errors import CheckpointNotFound, typed
from tenuto.events import AnySink, Emitter, listed
from tenuto.model.ids import CheckpointId
from tenuto.repo.keys import KeySource, unlock
from tenuto.repo.lineage import resolve
from tenuto.repo.repository import Repo
from tenuto.store.contract import Where
from tenuto.store.registry import open_store, redirected
from tenuto.telemetry.console import console


def open(
    where: Where,
    *,
    run: str = "main",
    step: int | str | CheckpointId = "latest",
    rank: int | None = None,
    key: KeySource | None = None,
    sinks: Iterable[AnySink] = (),
) -> Opened:
    """Opens a checkpoint for inspection, without restoring it: `with tenuto.open(where) as opened: …`.

    `step` is a number, "latest", a tag, or a whole identity. Reads the manifest and the index, not the leaves. For
    "latest", checkpoints whose manifest or index is damaged, or whose data files are missing or cut, are skipped as in
    a restore. Nothing is written or claimed.

    A checkpoint that several ranks have saved has every leaf, whichever rank has which part of it. Values that belong
    to one rank are those of `rank`; of a checkpoint of a single rank they are always there.

    `key` opens a sealed repository, as in Checkpointer.

    Raises NotARepository, RunNotFound, CheckpointNotFound, NothingRestorable, CorruptionError, and UsageError if there
    is no such rank.
    """
    sinks = listed(sinks)
    emitter = Emitter(sinks, console(None, sinks))
    repo = Repo.open(open_store(redirected(where)))
    unlock(repo, key)

    def attempt(id: CheckpointId) -> Opened:
        return open_checkpoint(repo, id, rank=rank, emitter=emitter)

    if step != "latest":
        return exactly(repo, resolve(repo, run, step), attempt)
    opened, skipped, _ = choose(repo, run, lambda id, _: attempt(id), emitter)
    if opened is None:
        resolve(repo, run, "latest")  # raises, naming what there is
        raise CheckpointNotFound(
            f"run {run!r} in {repo.url} has no checkpoint", subject=run, hint=typed("tenuto", "ls", repo.url)
        )
    opened.skipped = tuple(skipped)
    report_skipped(emitter, repo.url, skipped, opened.id)
    return opened
