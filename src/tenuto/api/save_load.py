"""Saving and loading once, without a training loop."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tenuto.concurrency.deadlines import seconds, within
from tenuto.engine.read.choose import (
    Checkpoint,
    CheckpointLeaves,
    Restored,
    RestoreResult,
    report_skipped,
    report_unhealthy,
    restore_checkpoint,
    restore_latest,
)
from tenuto.errors import (
    CheckpointNotFound,
    DeadlineExceeded,
    NotARepository,
    RunNotFound,
    StoreError,
    Superseded,
    UsageError,
    in_words,
    typed,
)
from tenuto.events import AnySink, Emitter, WaitingForOwner, listed
from tenuto.model.ids import CheckpointId, run_key
from tenuto.model.records import Manifest
from tenuto.ranks.contract import TIMEOUT_S, Ranks
from tenuto.ranks.detection import Solo, find_ranks
from tenuto.ranks.kv.torch_store import initialised
from tenuto.repo.keys import KeySource, unlock
from tenuto.repo.lineage import latest, resolve
from tenuto.repo.replicated.members import ANSWER_S
from tenuto.repo.replicated.places import followers_of, report_to, tiers_of
from tenuto.repo.repository import Repo
from tenuto.state import frameworks
from tenuto.state.contract import Flattened, Prepared
from tenuto.state.restore.match import match_state
from tenuto.store.contract import Store, Where
from tenuto.store.registry import open_store, redirected
from tenuto.telemetry.console import Log, console

# What only saves and only several ranks need is imported where it is used: a process that loads once pays for neither.
if TYPE_CHECKING:
    from tenuto.engine.save.rank_group import RankGroup
    from tenuto.policy.encoding import Encoding, Preset
    from tenuto.policy.keep import KeepPolicy
    from tenuto.repo.ownership.claim import Attempt
    from tenuto.sharding.write_plan import Strategy
    from tenuto.training import run_registry

Pattern = str | re.Pattern[str]

_attempts: dict[run_registry.Key, tuple[Attempt, int]] = {}
"""The attempts that one-off saves of this process have claimed, and the last step of each."""
_loaded: dict[run_registry.Key, CheckpointId] = {}
"""The checkpoint that this process last loaded from each run: the parent of its next attempt."""
_saving: dict[run_registry.Key, threading.Lock] = {}
"""Locked by a save of the run while it lasts. The tables themselves need no lock: each is read and written in single
steps of the interpreter. So no load ever waits for a save, which may last as long as its store hangs."""


def _forget() -> None:
    """Clears the tables in a forked child: the attempts are its parent's, and threads that it lacks may hold the
    locks."""
    _attempts.clear()
    _saving.clear()


os.register_at_fork(after_in_child=_forget)


def save(
    state: Any,
    where: Where,
    *,
    step: int | None = None,
    run: str = "main",
    ranks: Ranks | None = None,
    ranks_timeout: float = TIMEOUT_S,
    writers: Strategy = "balanced",
    wait_for_owner: float | None = None,
    encoding: Encoding | Preset = "plain",
    key: KeySource | None = None,
    log: Log | None = None,
    sinks: Iterable[AnySink] = (),
) -> Checkpoint:
    """Saves `state` and returns once it is committed. `step=None` is the one after `latest`.

    Nothing is removed. In a job of several processes (torch.distributed is initialised, or `ranks` names them) every
    rank calls it with its own part of the state, and one checkpoint is made of all; `ranks_timeout` is how many seconds
    they wait for one that is missing. A rank that saves by itself there passes `ranks=tenuto.Solo()`. What several
    ranks hold is written by all of them, or as `writers` says (see Checkpointer). `wait_for_owner` is for how many
    seconds it waits for another process that owns the run. `encoding`, `key`, `log` and `sinks` are as in Checkpointer;
    a save that goes well prints nothing.

    Raises Unserialisable naming the path of what cannot be represented, RunInUse if another live process owns the run
    (UsageError if a Checkpointer of this one trains it), errors of the store, and of several ranks RanksMissing,
    RanksDisagree, RankFailed and ShardMismatch; the checkpoints that were there stay as they are.
    """
    return save_made(
        lambda _: state,
        where,
        step=step,
        run=run,
        ranks=ranks,
        ranks_timeout=ranks_timeout,
        writers=writers,
        wait_for_owner=wait_for_owner,
        encoding=encoding,
        key=key,
        log=log,
        sinks=sinks,
    )


Share = Callable[[bytes], Sequence[bytes]]
"""Gives every rank the bytes of all ranks, by rank. Every rank calls it as often."""


def save_made(
    make: Callable[[Share], Any],
    where: Where,
    *,
    step: int | None = None,
    run: str = "main",
    ranks: Ranks | None = None,
    ranks_timeout: float = TIMEOUT_S,
    writers: Strategy = "balanced",
    wait_for_owner: float | None = None,
    keep: KeepPolicy | None = None,
    encoding: Encoding | Preset = "plain",
    key: KeySource | None = None,
    log: Log | None = None,
    sinks: Iterable[AnySink] = (),
) -> Checkpoint:
    """Saves as `save` does the state that `make` returns. What `make` raises on one rank is told to all of them; what
    the ranks have to know of each other for it, they share. `keep`: which checkpoints of the run stay once this one is
    committed; None: all of them."""
    from tenuto.policy.encoding import encoding_of
    from tenuto.state.encode.flattener import flatten
    from tenuto.training.arguments import strategy
    from tenuto.training.snapshot import check_platform

    check_platform()
    patience_s, writers = seconds(ranks_timeout, "ranks_timeout="), strategy(writers)
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise UsageError(f"step={step!r} is not a number of completed steps", subject="step", hint="step=500")
    stored = encoding_of(encoding)
    wait_s = None if wait_for_owner is None else seconds(wait_for_owner, "wait_for_owner=")
    ranks, where, sinks = find_ranks(ranks), redirected(where), listed(sinks)
    emitter = Emitter(sinks, console(log, sinks, rank=ranks.rank, raises=True))
    if ranks.world_size > 1:
        from tenuto.engine.group.group import joined_group

        facts = {"step": "the next" if step is None else str(step), "encoding": str(stored)}
        met = joined_group(ranks, where, run, emitter, patience_s, call="save", facts=facts, writers=writers)
        with met as (group, repo):

            def share(data: bytes) -> Sequence[bytes]:
                with group.round("shared") as round:
                    return round.all_gather(data, patience_s, "sharing what the ranks have to know of each other")

            unlock(repo, key, writing=True)
            return _saved(
                repo,
                flatten(make(share), rank=group.rank),
                run,
                step,
                keep,
                wait_s=wait_s,
                encoding=stored,
                emitter=emitter,
                group=group,
            )
    from tenuto.engine.save.rank_group import SoloGroup

    flattened = flatten(make(lambda data: [data]))
    repo = Repo.create_or_open(open_store(where), once=True)
    unlock(repo, key, writing=True)
    with _saving.setdefault((repo.id, run_key(run)), threading.Lock()):
        return _saved(
            repo, flattened, run, step, keep, wait_s=wait_s, encoding=stored, emitter=emitter, group=SoloGroup()
        )


def _saved(
    repo: Repo,
    flattened: Flattened,
    run: str,
    step: int | None,
    keep: KeepPolicy | None,
    *,
    wait_s: float | None,
    encoding: Encoding,
    emitter: Emitter,
    group: RankGroup,
) -> Checkpoint:
    from tenuto.engine.save.job import ManifestDetails
    from tenuto.engine.save.saver import Saver
    from tenuto.training import run_registry
    from tenuto.training.snapshot import environment

    key = (repo.id, run_key(run))
    if run_registry.live(key) is not None:
        raise UsageError(
            f"a Checkpointer of this process trains run {run!r} in {repo.url}",
            subject=run,
            hint="call its save(), close it, or save to another run",
        )
    report_to(repo.store, partial(emitter.report, subject=run))
    attempt, number = group.agree_on_attempt(
        repo, lambda: _attempt(repo, run, key, step, wait_s=wait_s, waiting=emitter.emit)
    )
    attempt.leave()  # whoever wants the run meanwhile waits: it is free once this save has ended
    saver = Saver(repo, run, emitter=emitter, lasting=False, protocol=group.protocol(repo), encoding=encoding)
    saver.attempt = attempt
    try:
        about = ManifestDetails(
            parent=attempt.parent, progress={"step": number}, environment=environment(), reason="asked for"
        )
        handle = saver.save(flattened, number, wait=True, about=about)
        id = handle.wait()
        attempt.committed(number)
        if group.coordinates:  # else it is another process's, which alone can hold the run by it
            _attempts[key] = (attempt, number)
        if keep is not None and group.coordinates:
            from tenuto.maintenance.retention import execute, plan_retention

            execute(repo, attempt, plan_retention(repo, attempt, keep), emitter=emitter)
    finally:
        attempt.release()
        saver.close()
    if group.coordinates and tiers_of(repo.store) is not None:
        from tenuto.maintenance.tier_copies import fill_now

        fill_now(repo, id, partial(emitter.report, subject=run))
    manifest = saver.manifest
    assert manifest is not None and manifest.id == id, "what was committed"
    return Checkpoint(repo.url, id, manifest.bytes, manifest.leaves, manifest.content, manifest.metrics)


def _attempt(
    repo: Repo,
    run: str,
    key: run_registry.Key,
    step: int | None,
    *,
    wait_s: float | None,
    waiting: Callable[[WaitingForOwner], None],
) -> tuple[Attempt, int]:
    """Returns this process's attempt for the run if `step` lies above its last one and no other process has claimed the
    run since; else a new one, claimed from what an owner that it waited for has committed at its end. Either owns the
    run until it is released."""
    from tenuto.repo.ownership.claim import claim_newest

    withdrawn: set[int] = set()
    newest = latest(repo, run)

    def number() -> int:
        return step if step is not None else (newest.step + 1 if newest is not None else 0)

    held = _attempts.get(key)
    # A promoted copy has the identity of the primary that this process may have saved to before.
    if held is not None and held[0].repo.url == repo.url and number() > held[1]:
        try:
            held[0].resume()
        except Superseded:
            pass  # another process owns the run: a new attempt
        else:
            return held[0], number()

    def parent() -> CheckpointId | None:
        found = _loaded.get(key, newest)
        return found if found is None or repo.exists(found) else newest

    def again() -> tuple[CheckpointId | None, CheckpointId | None]:
        nonlocal newest
        newest = latest(repo, run, withdrawn=withdrawn)
        return newest, parent()

    attempt = claim_newest(
        repo, run, newest, parent(), again=again, withdrawn=withdrawn, wait_s=wait_s, waiting=waiting
    )
    return attempt, number()


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
    ranks: Ranks | None = None,
    ranks_timeout: float = TIMEOUT_S,
    key: KeySource | None = None,
    log: Log | None = None,
    sinks: Iterable[AnySink] = (),
) -> Restored:
    """Loads a checkpoint, every byte verified: into existing objects (`into`, the same kind of thing that was saved),
    or fresh.

    - `into`: a mapping as it was saved, or one module: it takes the one entry that fits it, and stays in `train()` or
      `eval()` as it is.
    - `step`: a step, "latest", a tag, "best:val_loss" (the best by that metric, in the direction that `keep.best` or
      `on.improve` recorded; else "best:val_loss:min" or ":max"), or attempt/step such as "a0007/500".
    - `strict`: every leaf of `into` is found with equal shape and dtype, and nothing is left over inside an entry that
      `into` names. Entries of the checkpoint that it does not name are ignored, and reported.
    - `rename`: the checkpoint's path to that of `into`: a mapping of prefixes, or a callable.
    - `include`, `exclude`: globs over the paths that `rename` leads to, each standing for what is below it as well, or
      compiled expressions.
    - `key`: opens a sealed repository, as in Checkpointer.
    - `device`: where new tensors go, and where an `into` that is one module is moved. What exists in an `into` that is
      a mapping stays where it is: an optimizer's state has to be where its parameters are.
    - `ranks`, `ranks_timeout`: in a job of several processes (torch.distributed is initialised, or `ranks` names them)
      every rank calls it, all get the same checkpoint, each what its own `into` holds of it, and any number of ranks
      may have saved it. `ranks=tenuto.Solo()` reads by itself there.
    - `log`, `sinks`: as in Checkpointer. A load that goes well prints nothing.

    Nothing is written, claimed or run. A load that is refused leaves `into` as it was; where an object's own load
    refuses when more than 256 MiB have been filled, the error names what is overwritten. Damage is found while bytes
    are read. Raises CheckpointNotFound, NothingRestorable, CorruptionError, StateMismatch;
    of several ranks also RanksMissing, RanksDisagree and RankFailed.
    """
    patience_s = seconds(ranks_timeout, "ranks_timeout=")
    ranks, where, sinks = ranks or initialised() or Solo(), redirected(where), listed(sinks)
    emitter = Emitter(sinks, console(log, sinks, rank=ranks.rank, raises=True))

    def match(manifest: Manifest, leaves: CheckpointLeaves) -> Prepared:
        return match_state(
            manifest.tree,
            leaves.private,
            leaves.specs,
            into,
            strict=strict,
            include=include,
            exclude=exclude,
            rename=rename,
            device=device,
            apart=ranks.world_size > 1,
        )

    if ranks.world_size > 1:
        from tenuto.engine.group.group import joined_group

        facts = {"step": str(step)}
        find = partial(_holding, run=run, step=step, emitter=emitter)
        met = joined_group(ranks, where, run, emitter, patience_s, call="load", facts=facts, find=find)
        with met as (group, repo):
            _ready(repo, run, key, emitter)
            found = _found(repo, run, group.restorer(repo, run, match, emitter).restore(step))
    else:
        repo = _ready(_holding(open_store(where), run, step, emitter), run, key, emitter)
        if step == "latest":
            found = _found(repo, run, restore_latest(repo, run, match, emitter=emitter))
        else:
            found = restore_checkpoint(repo, resolve(repo, run, step), match, emitter=emitter)
    _loaded[(repo.id, run_key(run))] = found.id
    if device is not None and into is not None:
        frameworks.move(into, device)
    if ranks.is_coordinator:
        report_skipped(emitter, repo.url, found.skipped, found.id)
        report_unhealthy(emitter, repo, found.manifest)
    return Restored.of(found, repo.url)


def _ready(repo: Repo, run: str, key: KeySource | None, emitter: Emitter) -> Repo:
    unlock(repo, key)
    report_to(repo.store, partial(emitter.report, subject=run))
    return repo


def _holding(store: Store, run: str, step: int | str, emitter: Emitter) -> Repo:
    """Opens the repository; where only one of its other tiers has what is meant, as that tier has it."""
    report = partial(emitter.report, subject=run)
    try:
        repo = Repo.open(store, report=report)
        if followers_of(repo.store):
            resolve(repo, run, step)
        return repo
    except (NotARepository, CheckpointNotFound, RunNotFound):
        for follower in followers_of(store):
            asked = partial(_asked, follower, run, step)
            try:
                there, id = within(ANSWER_S, f"asking {follower.url}", asked, subject=follower.url)
            except (NotARepository, CheckpointNotFound, RunNotFound):
                continue
            except (StoreError, DeadlineExceeded) as error:
                report(f"{follower.url}, which may have what is not in {store.url}, is left out: {in_words(error)}")
                continue
            report(f"step {id.step} of run {id.run} is not in {store.url}: read from {follower.url}")
            return there
        raise


def _asked(store: Store, run: str, step: int | str) -> tuple[Repo, CheckpointId]:
    repo = Repo.open(store)
    return repo, resolve(repo, run, step)


def _found(repo: Repo, run: str, result: RestoreResult | None) -> RestoreResult:
    """Returns `result`; raises CheckpointNotFound if the run has no checkpoint."""
    if result is None:
        resolve(repo, run, "latest")  # raises, naming what there is
        raise CheckpointNotFound(
            f"run {run!r} in {repo.url} has no checkpoint", subject=run, hint=typed("tenuto", "ls", repo.url)
        )
    return result
