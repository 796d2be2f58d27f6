"""Which checkpoint a run means: the walk of invariant I4.

The committed steps of the highest attempt, descending; then its parent attempt's, from the parent step down; and so on,
across runs where a run was forked from another. An attempt with no commit and no parent is passed over. No clock,
modification time or movable pointer takes part.

Damage must not hide what is older. A damaged manifest is yielded like any other: reading it says what is wrong, and the
reader goes on. Where an attempt's record is damaged or gone, its parent is taken from what else the attempt wrote; if
nothing says it, the walk goes on with the next lower attempt, and reports that it does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from itertools import chain, dropwhile, islice
from typing import Final

from tenuto.errors import (
    CheckpointNotFound,
    CorruptionError,
    ObjectNotFound,
    RunNotFound,
    UsageError,
    did_you_mean,
    typed,
)
from tenuto.model.ids import CheckpointId, run_key
from tenuto.record import record
from tenuto.repo.best import BEST, BestSelector, best
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.objects import Fields, Origin
from tenuto.repo.format.small_records import check_parent
from tenuto.repo.lost import Witnesses
from tenuto.repo.refs import find_tag, is_name, list_tags
from tenuto.repo.repository import Repo, known_runs

Report = Callable[[str], None]
Misplaced = Callable[[CheckpointId, Origin], None]

_SAVES_ASKED: Final = 16
"""Saves of an attempt that are asked for its parent, where its own record does not tell."""
_ATTEMPTS_ASKED: Final = 32
"""Attempts in which another checkpoint of the same step is looked for: one look each."""
_LOOKS: Final = 5
"""How often `latest` looks where something had been. Each look in vain needs a commit and a removal while it lasts."""
_ID: Final = re.compile(r"(?:([^/]+)/)?a([0-9]{1,18})/(?:step-)?([0-9]{1,18})", re.ASCII)


@record
class _Origin:
    """Where an attempt came from. `known` is False where nothing readable says it."""

    parent: CheckpointId | None
    known: bool = True


@dataclass(slots=True)
class Stretch:
    """What the walk visits of one attempt: its committed steps up to `top`, or all of them.

    empty: whether there are none, None as long as nobody has looked.
    listed: whether there were directories of steps up to `top`, committed or not.
    """

    run: str
    attempt: int
    top: int | None
    empty: bool | None = None
    listed: bool = False

    def covers(self, id: CheckpointId) -> bool:
        """Returns whether the checkpoint is on the walk, if it exists."""
        return (id.run, id.attempt) == (self.run, self.attempt) and (self.top is None or id.step <= self.top)

    def committed(
        self, repo: Repo, known: Container[CheckpointId] = frozenset(), misplaced: Misplaced | None = None
    ) -> Iterator[CheckpointId]:
        """Yields its checkpoints, newest first, as `walk` does."""
        for step in self._steps(repo):
            self.listed = True
            id = CheckpointId(self.run, self.attempt, step)
            if id in known or repo.exists(id):
                yield id
            elif misplaced is not None:
                origin = repo.misplaced(id)
                if origin is not None:
                    misplaced(id, origin)

    def _steps(self, repo: Repo) -> Iterator[int]:
        """Yields the steps that have a directory, newest first, and `top` in any case: nearly always it is the first
        that exists, and no listing is needed."""
        top = self.top
        if top is None:
            yield from repo.newest_steps(self.run, self.attempt)
            return
        yield top
        yield from (step for step in repo.steps(self.run, self.attempt) if step < top)

    def is_empty(self, repo: Repo, known: Container[CheckpointId]) -> bool:
        if self.empty is None:
            self.empty = next(self.committed(repo, known), None) is None
        return self.empty


def walk(
    repo: Repo,
    run: str,
    *,
    below: int | None = None,
    report: Report | None = None,
    known: Container[CheckpointId] = frozenset(),
    withdrawn: Container[int] = frozenset(),
    misplaced: Misplaced | None = None,
) -> Iterator[CheckpointId]:
    """The run's checkpoints in the order in which `latest` would mean them, lazily: the first costs one listing of the
    attempts and one of the newest. `below`: as if no attempt from this number on had been claimed. `known`: checkpoints
    that the caller has just found to be there, so that nobody need look again. `withdrawn`: attempts of this run that
    the caller claimed and gave back unused, as if they had never been claimed: their parents would hide what was
    committed before them.

    `misplaced` is called with each place on the walk in which a copy of another checkpoint lies, or a checkpoint of
    another repository: what had been there is lost to the walk. `report` is told of damage that the walk goes around.
    Bounded by the attempts that exist, whatever they say.
    """
    for stretch in stretches(repo, run, below=below, report=report, known=known, withdrawn=withdrawn):
        stretch.empty = True
        for id in stretch.committed(repo, known, misplaced):
            stretch.empty = False
            yield id


def stretches(
    repo: Repo,
    run: str,
    *,
    below: int | None = None,
    report: Report | None = None,
    known: Container[CheckpointId] = frozenset(),
    withdrawn: Container[int] = frozenset(),
) -> Iterator[Stretch]:
    """Yields the parts of the walk, one for each attempt that it visits: about one read for each, however many
    checkpoints there are. The arguments are those of `walk`."""
    run = run_key(run)
    warn: Report = report or (lambda message: None)
    visited: set[tuple[str, int]] = set()
    own = run
    place = _highest(repo, run, below, withdrawn)
    beginning, top = True, None
    while place is not None and (run, place) not in visited:
        visited.add((run, place))
        stretch = Stretch(run, place, top)
        yield stretch
        empty = beginning and stretch.is_empty(repo, known)
        origin = _origin(repo, run, place, warn, unclaimed=empty)
        if origin.parent is not None:
            run, place, top = origin.parent.run, origin.parent.attempt, origin.parent.step
            beginning = False
        elif not origin.known or empty:
            beginning, top = True, None
            place = _highest(repo, run, place, withdrawn if run == own else ())
        else:
            return


def latest(
    repo: Repo,
    run: str,
    *,
    below: int | None = None,
    report: Report | None = None,
    withdrawn: Container[int] = frozenset(),
) -> CheckpointId | None:
    """Returns the checkpoint that the run means now, damaged or not; None if it has none.

    While a run is trained, a listing may be older than the next commit, and what it names gone by the time that it is
    looked at. So a look that finds nothing where something had been is no answer: it is taken again.
    """
    for _ in range(_LOOKS):
        had_some = False
        for stretch in stretches(repo, run, below=below, report=report, withdrawn=withdrawn):
            found = next(stretch.committed(repo), None)
            if found is not None:
                return found
            stretch.empty = True
            had_some = had_some or stretch.listed or stretch.top is not None
        if not had_some:
            break
    return None


def resolve(repo: Repo, run: str, step: int | str | CheckpointId | BestSelector = "latest") -> CheckpointId:
    """The checkpoint that a person means: a step, "latest", a tag, the best by a metric (`best:val_loss`,
    `best:val_loss:max`), or a whole identity (`a0007/500`, `gpt/a0007/500`).

    A step that several attempts have is the first on the walk, else the highest attempt's. Raises RunNotFound or
    CheckpointNotFound, which name what there is.
    """
    if isinstance(step, CheckpointId):
        return _existing(repo, step)
    if isinstance(step, str):
        step = BestSelector.parse(step) or step
    if isinstance(step, BestSelector):
        if not repo.attempts(run):
            raise _none_in(repo, run)
        return best(repo, run, step)
    if isinstance(step, str) and step != "latest":
        found = _ID.fullmatch(step)
        if found:
            return _existing(repo, CheckpointId(found[1] or run, int(found[2]), int(found[3])))
        if may_be_tag(step):
            return _tagged(repo, step)
        step = int(step)
    if step == "latest":
        newest = latest(repo, run)
        if newest is None:
            raise _none_in(repo, run)
        return newest
    return _by_step(repo, run, int(step))


def same_step(repo: Repo, id: CheckpointId) -> list[CheckpointId]:
    """Returns the run's other checkpoints of the same step, as a run has them that was rolled back: those of the
    newest attempts first. Looks into no more than the newest `_ATTEMPTS_ASKED`."""
    attempts = [number for number in repo.attempts(id.run) if number != id.attempt][-_ATTEMPTS_ASKED:]
    others = (CheckpointId(id.run, number, id.step) for number in reversed(attempts))
    return [other for other in others if repo.exists(other)]


def line_of(repo: Repo, run: str, id: CheckpointId, *, report: Report | None = None) -> Iterator[CheckpointId]:
    """Yields the line of training that leads to `id` within `run`, newest first, `id` itself included: what `walk`
    would yield if `id` were the latest."""
    key = run_key(run)
    if id.run == key:
        above = (one for one in walk(repo, run, below=id.attempt + 1, report=report))
        yield from dropwhile(lambda one: (one.run, one.attempt) == (key, id.attempt) and one.step > id.step, above)
    else:
        yield from dropwhile(lambda one: one != id, walk(repo, run, report=report))


def parent_of(repo: Repo, run: str, attempt: int) -> CheckpointId | None:
    """Returns what an attempt came from, as far as anything of it says; None for one that came from nothing."""
    return _origin(repo, run_key(run), attempt, lambda message: None, unclaimed=True).parent


def may_be_tag(step: str) -> bool:
    """Returns whether `resolve` would look for a tag of this name, whatever the run."""
    named = step == "latest" or step.startswith(BEST) or _ID.fullmatch(step) is not None
    return not named and not (step.isascii() and step.isdigit())


def _tagged(repo: Repo, name: str) -> CheckpointId:
    """Returns the checkpoint of a tag. A tag belongs to the repository and may name a checkpoint of another run."""
    hint = "give a step, latest, a tag, best:METRIC, or attempt/step such as a0007/500"
    if not is_name(name):
        raise UsageError(f"{name!r} names no checkpoint", subject=name, hint=hint)
    id = find_tag(repo, name)
    if id is None:
        names = list_tags(repo)
        tags = ", ".join(names) or "none"
        raise CheckpointNotFound(
            f"{name!r} names no checkpoint: it is neither a step nor a tag; tags that there are: {tags}",
            subject=name,
            hint=hint if name == "best" else did_you_mean(name, [*names, "latest"]) or hint,
        )
    return _existing(repo, id)


def _by_step(repo: Repo, run: str, step: int) -> CheckpointId:
    on_walk = ((one.run, one.attempt) for one in stretches(repo, run) if one.top is None or step <= one.top)
    attempts = ((run_key(run), number) for number in reversed(repo.attempts(run)))
    places: dict[tuple[str, int], None] = {}
    for place in chain(on_walk, attempts):
        places[place] = None
        id = CheckpointId(*place, step)
        if repo.exists(id):
            return id
    for place in places:
        _refuse_lost(repo, CheckpointId(*place, step))
    there = [CheckpointId(*place, other) for place in places for other in repo.steps(*place)]
    nearest = (id.step for id in sorted(there, key=lambda id: abs(id.step - step)) if repo.exists(id))
    near = sorted(islice(dict.fromkeys(nearest), 5))
    if not near:
        raise _none_in(repo, run)
    raise CheckpointNotFound(
        f"run {run!r} has no checkpoint of step {step}; the nearest {'are' if len(near) > 1 else 'is'} "
        f"{', '.join(map(str, near))}",
        subject=f"{run}/{step}",
        hint=f"{typed('tenuto', 'ls', repo.url)} shows all",
    )


def _existing(repo: Repo, id: CheckpointId) -> CheckpointId:
    if repo.exists(id):
        return id
    if not repo.attempts(id.run):
        raise _none_in(repo, id.run)
    _refuse_lost(repo, id)
    newest = islice(Stretch(id.run, id.attempt, None).committed(repo), 10)
    there = ", ".join(str(one.step) for one in newest) or "none"
    raise CheckpointNotFound(
        f"no checkpoint {id} at {repo.url}; steps of that attempt: {there}",
        subject=str(id),
        hint=f"{typed('tenuto', 'ls', repo.url)} shows all",
    )


def _refuse_lost(repo: Repo, id: CheckpointId) -> None:
    """Raises CheckpointNotFound for a checkpoint that has lost its manifest."""
    why = Witnesses(repo, [id.run]).lost(id)
    if why:
        raise CheckpointNotFound(
            f"checkpoint {id} is damaged: its manifest is missing ({why})",
            subject=str(id),
            hint=f"{typed('tenuto', 'repair', repo.url, '--from', 'BACKUP')} brings it back from a copy",
        )


def _none_in(repo: Repo, run: str) -> RunNotFound | CheckpointNotFound:
    if repo.attempts(run):
        return CheckpointNotFound(f"run {run!r} at {repo.url} has no checkpoint yet", subject=run)
    runs = repo.runs()
    hint = did_you_mean(run_key(run), runs) or f"{typed('tenuto', 'ls', repo.url)} shows what there is"
    return RunNotFound(f"no run {run!r} at {repo.url}; {known_runs(runs)}", subject=run, hint=hint)


def _highest(repo: Repo, run: str, below: int | None, without: Container[int]) -> int | None:
    if below is not None and below <= 1:
        return None  # attempts are counted from 1
    numbers = (number for number in repo.attempts(run) if number not in without)
    return max((number for number in numbers if below is None or number < below), default=None)


def _origin(repo: Repo, run: str, number: int, warn: Report, *, unclaimed: bool) -> _Origin:
    """Returns the attempt's parent. `unclaimed`: an absent record is no loss, because nothing was committed and nothing
    refers to it."""
    try:
        record = repo.find_attempt(run, number)
        if record is not None:
            return _Origin(record.parent)
        if unclaimed:
            return _Origin(None)
        trouble = f"attempt {number} of run {run} has no record of its own"
    except CorruptionError as error:
        trouble = error.message
    parent = _origin_from_saves(repo, run, number)
    if parent is None:
        warn(f"{trouble}; what it was restored from is not known, the walk continues with the next lower attempt")
        return _Origin(None, known=False)
    warn(f"{trouble}; its parent was taken from its other objects")
    return parent


def _origin_from_saves(repo: Repo, run: str, number: int) -> _Origin | None:
    """Returns the parent according to the attempt's lease or one of its saves."""
    directory = object_names.lease_directory(run, number)
    for file in repo.store.children(directory).objects:
        beat = object_names.parse_numbered(file)
        if beat is not None:
            try:
                data = repo.store.get(f"{directory}/{file}", limit=objects.SMALL)
                return _parent_in(repo.decode("lease", f"{directory}/{file}", data), run, number)
            except (ObjectNotFound, CorruptionError):
                continue
    for step in islice(repo.newest_steps(run, number), _SAVES_ASKED):
        id = CheckpointId(run, number, step)
        try:
            name = object_names.begin_name(id)
            data = repo.store.get(name, limit=objects.SMALL)
            return _parent_in(repo.decode("begin", name, data), run, number)
        except (ObjectNotFound, CorruptionError):
            continue
    return None


def _parent_in(found: Fields, run: str, number: int) -> _Origin:
    """Returns what a lease or a `begin.json` of an attempt says that it came from. Raises CorruptionError."""
    parent = found.checkpoint("parent")
    check_parent(parent, run, number, found)
    return _Origin(parent)
