"""Bugs in policies and retention, put in by name one at a time: each must be found by the random histories."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from campaigns.retention_histories.campaign import run_histories
from campaigns.simulated_processes import replacing
from tenuto.maintenance import facts as gathering
from tenuto.maintenance import gc, remove, retention, trash
from tenuto.model.ids import CheckpointId
from tenuto.policy import keep
from tenuto.policy.keep import Best, CheckpointFacts, EveryHours, EverySteps, Latest
from tenuto.repo import lineage
from tenuto.repo.catalog import Catalog, Snapshot
from tenuto.repo.format import objects
from tenuto.repo.refs import Ref, list_refs
from tenuto.repo.repository import Repo

MOST = 600
"""Histories within which a bug must be found."""


@dataclass(frozen=True, slots=True)
class Bug:
    """`breaks`: what goes wrong, in one sentence."""

    name: str
    breaks: str
    patch: Callable[[], AbstractContextManager[Any]]


def _unprotected(reason: Callable[[str], bool]) -> Callable[[], AbstractContextManager[Any]]:
    """Protections whose reasons match are left out."""
    original = keep.protections

    def fewer(history: Sequence[CheckpointFacts]) -> dict[CheckpointId, list[str]]:
        return {id: [why for why in reasons if not reason(why)] for id, reasons in original(history).items()}

    return lambda: replacing(original, fewer)


def _facts(change: Callable[[CheckpointFacts], CheckpointFacts]) -> Callable[[], AbstractContextManager[Any]]:
    original = gathering.gather_facts

    def changed(repo: Repo, run: str, **options: Any) -> list[CheckpointFacts]:
        return [change(facts) for facts in original(repo, run, **options)]

    return lambda: replacing(original, changed)


def _method(owner: type, name: str, replacement: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(owner, name, replacement)


def _function(module: Any, name: str, replacement: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: replacing(getattr(module, name), replacement)


def _newest_by_clock(facts: CheckpointFacts) -> tuple[float, int]:
    return (facts.created_s or 0.0, facts.id.step)


@contextmanager
def _age_by_clock() -> Iterator[None]:
    with mock.patch.object(CheckpointFacts, "age_key", property(_newest_by_clock)):
        yield


@contextmanager
def _no_second_listing() -> Iterator[None]:
    """After the tombstones, nobody asks again."""
    with mock.patch.object(
        retention,
        "_still_free",
        lambda snapshot, attempt, plan, going, *_: retention._Judged(frozenset(going), plan.trash, owns=True),
    ):
        yield


@contextmanager
def _everything_in_the_directory() -> Iterator[None]:
    original = retention._free

    def free(repo: Repo, going: Mapping[CheckpointId, list[str]], objects: int) -> None:
        original(repo, going, objects)
        repo.store.delete([entry.name for id in going for entry in repo.store.walk(id.directory)])

    with mock.patch.object(retention, "_free", free):
        yield


@contextmanager
def _copies_count() -> Iterator[None]:
    """A copied directory counts as a checkpoint."""
    with mock.patch.object(objects, "is_copy", lambda name, data, repository: False):
        yield


def _nan_wins(self: Best, history: Sequence[CheckpointFacts]) -> list[CheckpointFacts]:
    sign = 1.0 if self.mode == "min" else -1.0
    having = [facts for facts in history if self.metric in facts.metrics]

    def key(facts: CheckpointFacts) -> float:
        value = facts.metrics[self.metric]
        return -math.inf if math.isnan(value) else sign * value

    return sorted(having, key=key)


@contextmanager
def _all_runs() -> Iterator[None]:
    original = gathering.gather_facts

    def everything(repo: Repo, run: str, **options: Any) -> list[CheckpointFacts]:
        return [facts for name in repo.runs() for facts in original(repo, name, **options)]

    with replacing(original, everything):
        yield


@contextmanager
def _no_tags() -> Iterator[None]:
    original = list_refs

    def fewer(repo: Repo, *args: Any, **options: Any) -> list[Ref]:
        return [ref for ref in original(repo, *args, **options) if ref.kind != "tag"]

    with replacing(original, fewer):
        yield


def _nothing(*arguments: Any, **options: Any) -> None:
    """Does nothing."""


def _first_verdict(told: Sequence[Any]) -> str:
    kinds = [note.kind for note in told if note.kind in ("verified", "suspect")]
    return kinds[0] if kinds else ""


def _latest_by_step(self: Latest, history: Sequence[CheckpointFacts]) -> list[keep.Opinion]:
    first = sorted(history, key=lambda facts: -facts.id.step)[: self.n]
    return [keep.Opinion(facts in first, "by step alone") for facts in history]


BUGS: tuple[Bug, ...] = (
    Bug("latest not protected", "the run has nothing to go on from", _unprotected(lambda why: "latest" in why)),
    Bug(
        "last verified not protected",
        "what was proven whole is gone",
        _unprotected(lambda why: why.startswith("the last one verified")),
    ),
    Bug(
        "fallback not protected",
        "latest is damaged, and the next whole one is gone",
        _unprotected(lambda why: "not known to be damaged" in why),
    ),
    Bug("pins not protected", "a pinned checkpoint is gone", _unprotected(lambda why: why == "pinned")),
    Bug("tags not protected", "a tagged checkpoint is gone", _unprotected(lambda why: why.startswith("tagged"))),
    Bug("holds not protected", "what a machine needs is gone", _unprotected(lambda why: why == "held")),
    Bug("tags not read", "a tagged checkpoint is gone", _no_tags),
    Bug(
        "forks not asked",
        "what another run goes on from is gone",
        _function(gathering, "_needed_elsewhere", lambda repo, run: iter(())),
    ),
    Bug(
        "the first verdict counts",
        "a checkpoint found damaged since counts as verified",
        _function(remove, "verification_of", _first_verdict),
    ),
    Bug(
        "damage not known",
        "a damaged checkpoint takes a whole one's place",
        _facts(lambda facts: replace(facts, suspect=False)),
    ),
    Bug(
        "a damaged note is passed over",
        "what it may have called the best, or whole, is gone",
        _facts(lambda facts: replace(facts, unread="")),
    ),
    Bug(
        "noted metrics not read",
        "the best by a metric that came late is gone",
        _function(gathering, "with_notes", lambda logged, told: dict(logged)),
    ),
    Bug(
        "superseded attempts retain",
        "two processes remove from one run",
        _function(retention, "_superseded", lambda repo, attempt: False),
    ),
    Bug("no second look", "who comes to need it after the plan is not seen", _no_second_listing),
    Bug(
        "tombstones stay",
        "what was spared can never be relied upon",
        _function(retention, "take_back", lambda *_: None),
    ),
    Bug(
        "lines left behind go at once",
        "who starts over by mistake has nothing to go back to",
        _function(retention, "lines_left_behind", lambda repo, run, facts: iter(())),
    ),
    Bug(
        "only the newest gets a day",
        "the best of a line left behind is freed at once",
        _function(retention, "worth_a_grace", lambda line, policy: {facts.id for facts in line[:1]}),
    ),
    Bug("no mark in the trash", "what lies in the trash stays for ever", _function(trash, "put_mark", _nothing)),
    Bug("foreign files go", "a person's files in a checkpoint are deleted", _everything_in_the_directory),
    Bug("copies count", "a copied directory is judged, and removed", _copies_count),
    Bug(
        "packs stay",
        "what is removed frees no space",
        _function(
            gc,
            "listed",
            lambda repo, save: [entry.name for entry in save.manifest.indexes] if save.manifest else [],
        ),
    ),
    Bug("newest by the clock", "a clock that ran backward decides what is newest", _age_by_clock),
    Bug(
        "latest by step alone",
        "an old line's higher steps push out the newer line",
        _method(Latest, "judge", _latest_by_step),
    ),
    Bug("nan is best", "a diverged checkpoint is kept as the best", _method(Best, "ranked", _nan_wins)),
    Bug(
        "modes mixed up",
        "the worst is kept as the best",
        _method(
            Best,
            "_value",
            lambda self, facts: (-1.0 if self.mode == "max" else 1.0) * float(facts.metrics.get(self.metric, math.nan)),
        ),
    ),
    Bug(
        "steps rounded up",
        "milestones of steps are the last of their span, and move",
        _method(EverySteps, "span", lambda self, facts: -(-facts.id.step // self.steps)),
    ),
    Bug(
        "days are hours",
        "milestones of hours are of other spans",
        _method(
            EveryHours, "span", lambda self, facts: None if facts.created_s is None else int(facts.created_s // 3600)
        ),
    ),
    Bug(
        "old look",
        "who has come to need it since the last round is not seen",
        _method(
            Catalog, "snapshot", lambda self, repo, run, anew=(): self.last_snapshot(run) or Snapshot(repo, self, run)
        ),
    ),
    Bug(
        "memory believed",
        "what was whole when it was read, and is damaged by now, stands in for what goes",
        _method(Snapshot, "is_fresh", lambda self, id: True),
    ),
    Bug("all runs judged", "another run's checkpoints are removed", _all_runs),
)
"""`keep` and `lineage` stand among the imports so that `replacing` finds what they know by name."""

assert keep and lineage


def run_bugs(seed: int, bugs: Sequence[Bug] = BUGS, most: int = MOST) -> list[dict[str, Any]]:
    """Each bug: after how many histories it was found, and by what; not caught if after `most` nothing broke."""
    found = []
    for bug in bugs:
        with bug.patch():
            counts, broken = run_histories(most, seed, until_broken=True)
        found.append(
            {
                "name": bug.name,
                "breaks": bug.breaks,
                "caught": bool(broken),
                "histories": counts.histories,
                "found_as": broken[0][:200] if broken else None,
            }
        )
    return found
