"""Saving and loading once, without a training loop."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast.api import ownership
from holdfast.api.environment import check_platform, environment
from holdfast.api.rehearsal import rehearsed
from holdfast.api.restored import Checkpoint, Restored
from holdfast.engine.job import About
from holdfast.engine.restore import Told, chosen, restore_checkpoint, restore_latest
from holdfast.engine.save import Saver
from holdfast.errors import CheckpointNotFound, Superseded, UsageError
from holdfast.events import Emitter, Sink
from holdfast.model.checkpoint import Manifest
from holdfast.model.names import CheckpointId, run_key
from holdfast.ranks.solo import solo
from holdfast.repo.attempts import Attempt, claim
from holdfast.repo.lineage import latest
from holdfast.repo.repository import Repo
from holdfast.state.contract import Prepared
from holdfast.state.flattener import flatten
from holdfast.state.prepare import prepare
from holdfast.store.contract import Where
from holdfast.store.registry import open_store

Pattern = str | re.Pattern[str]

_attempts: dict[ownership.Key, tuple[Attempt, int]] = {}
"""The attempts that one-off saves of this process have claimed, and the last step of each."""
_loaded: dict[ownership.Key, CheckpointId] = {}
"""What this process last loaded from each run: the parent of its next attempt."""
_lock = threading.Lock()


def save(
    state: Any, where: Where, *, step: int | None = None, run: str = "main", sinks: Sequence[Sink] = ()
) -> Checkpoint:
    """Saves `state` and returns once it is committed. `step=None` is the one after `latest`.

    Everything is kept. Raises Unserialisable naming the path of what cannot be represented, RunInUse if another live
    process owns the run (UsageError if a Checkpointer of this one trains it), and errors of the store; the checkpoints
    that were there stay as they are.
    """
    check_platform()
    solo()
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise UsageError(f"step={step!r} is no number of completed steps", subject="step")
    flattened = flatten(state)
    emitter = Emitter.of(sinks)
    repo = Repo.create_or_open(open_store(rehearsed(where)))
    key = (repo.id, run_key(run))
    if ownership.live(key) is not None:
        raise UsageError(
            f"a Checkpointer of this process trains run {run!r} in {repo.url}",
            subject=run,
            hint="call its save(), close it, or save to another run",
        )
    with _lock:
        attempt, number = _attempt(repo, run, key, step)
        saver = Saver(repo, run, emitter=emitter, lasting=False)
        saver.attempt = attempt
        try:
            about = About(
                parent=attempt.parent, progress={"step": number}, environment=environment(), reason="asked for"
            )
            handle = saver.save(flattened, number, wait=True, about=about)
            id = handle.wait()
            _attempts[key] = (attempt, number)
        finally:
            attempt.release()
            saver.close()
    manifest = saver.manifest
    assert manifest is not None and manifest.id == id, "what was committed"
    return Checkpoint(repo.url, id, manifest.bytes, manifest.leaves, manifest.content, manifest.metrics)


def _attempt(repo: Repo, run: str, key: ownership.Key, step: int | None) -> tuple[Attempt, int]:
    """This process's attempt for the run if `step` lies above its last one and nobody has claimed since; else a new
    one."""
    newest = latest(repo, run)
    number = step if step is not None else (newest.step + 1 if newest is not None else 0)
    held = _attempts.get(key)
    if held is not None and number > held[1]:
        try:
            held[0].check()
        except Superseded:
            pass  # not ours any more: a new attempt it is
        else:
            return held[0], number
    parent = _loaded.get(key, newest)
    if parent is not None and not repo.exists(parent):
        parent = newest
    return claim(repo, run, parent), number


def load(
    where: Where,
    into: Any = None,
    *,
    run: str = "main",
    step: int | str = "latest",
    strict: bool = True,
    include: Pattern | Sequence[Pattern] | None = None,
    exclude: Pattern | Sequence[Pattern] | None = None,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    device: Any = None,
    sinks: Sequence[Sink] = (),
) -> Restored:
    """Loads a checkpoint, every byte verified: into existing objects (`into`, the same kind of thing that was saved),
    or fresh.

    - `step`: a step, "latest", a tag, or attempt/step such as "a0007/500".
    - `strict`: every leaf of `into` is found with equal shape and dtype, and nothing is left over inside an entry that
      `into` names. Entries of the checkpoint that it does not name are left aside, and reported.
    - `rename`: the checkpoint's path to that of `into`: a mapping of prefixes, or a callable.
    - `include`, `exclude`: globs over the paths that `rename` leads to, each standing for what is below it as well, or
      compiled expressions.
    - `device`: where tensors that are made anew go.

    Nothing is written, claimed or run. Raises CheckpointNotFound, NothingRestorable, CorruptionError, StateMismatch.
    """
    emitter = Emitter.of(sinks)
    repo = Repo.open(open_store(rehearsed(where)))

    def match(manifest: Manifest, told: Told) -> Prepared:
        return prepare(
            manifest.tree,
            told.private,
            told.specs,
            into,
            strict=strict,
            include=include,
            exclude=exclude,
            rename=rename,
            device=device,
        )

    if step == "latest":
        result = restore_latest(repo, run, match, emitter=emitter)
        if result is None:
            chosen(repo, run, "latest")  # raises, naming what there is
            raise CheckpointNotFound(
                f"run {run!r} in {repo.url} has no checkpoint", subject=run, hint=f"holdfast ls {repo.url}"
            )
    else:
        result = restore_checkpoint(repo, chosen(repo, run, step), match, emitter=emitter)
    with _lock:
        _loaded[(repo.id, run_key(run))] = result.id
    return Restored.of(result, repo.url)
