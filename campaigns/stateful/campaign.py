"""The campaign of random histories: `python -m campaigns.stateful --examples 2000 --seed 1 --json out`.

Exit status 1 if a history contradicts the model, or a seeded bug does not.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Final
from unittest import mock

from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from campaigns.result_file import ResultHeader, deliver, options
from campaigns.simulated_processes import replacing
from campaigns.stateful.directed import run_directed
from campaigns.stateful.machine import Product
from campaigns.stateful.operator_rules import OperatorRules, counted
from campaigns.stateful.ranks import RankProduct
from tenuto.api import repository as api
from tenuto.engine.read import choose, chunk_reader
from tenuto.history import fork, rollback
from tenuto.maintenance import (
    checkpoint_copy,
    facts,
    findings,
    gc,
    remove,
    rename_run,
    repair,
    repair_plan,
    retention,
    undelete,
    verify,
)
from tenuto.model.ids import CheckpointId
from tenuto.policy import calendar
from tenuto.repo import catalog, lineage, lost
from tenuto.repo.notes import add_note
from tenuto.repo.ownership import claim
from tenuto.repo.refs import list_refs
from tenuto.repo.repository import Repo

MODULE: Final = "campaigns.stateful"
STEPS: Final = 25


@dataclass(frozen=True)
class Bug:
    """`ranks`: whether histories of several ranks can tell too: there no bits rot, and runs have no other history."""

    name: str
    patch: Callable[[], AbstractContextManager[Any]]
    ranks: bool = True


def _nothing_skipped() -> AbstractContextManager[Any]:
    def silent(*arguments: Any, **options: Any) -> tuple[Any, list[Any], Any]:
        found, _, newest = whole(*arguments, **options)
        return found, [], newest

    whole = choose.choose
    return mock.patch.object(choose, "choose", silent)


def _lowest_step_first() -> AbstractContextManager[Any]:
    steps = Repo.steps
    return mock.patch.object(Repo, "steps", lambda self, run, attempt: sorted(steps(self, run, attempt)))


def _nothing_is_wrong() -> AbstractContextManager[Any]:
    execute = verify.execute

    def lenient(*arguments: Any, **options: Any) -> Any:
        return replace(execute(*arguments, **options), findings=())

    return replacing(execute, lenient)


def _rolled_back_to_latest() -> AbstractContextManager[Any]:
    def elsewhere(repo: Repo, run: str, parent: CheckpointId | None, **more: Any) -> Any:
        return claim.claim(repo, run, lineage.latest(repo, run), **more)

    return mock.patch.object(rollback, "claim", elsewhere)


def _newest_attempt_first() -> AbstractContextManager[Any]:
    def by_step(repo: Repo, run: str, step: int) -> CheckpointId:
        ids = (CheckpointId(run, number, step) for number in reversed(repo.attempts(run)))
        return next((id for id in ids if repo.exists(id)), None) or whole(repo, run, step)

    whole = lineage._by_step
    return mock.patch.object(lineage, "_by_step", by_step)


def _noted_on_the_latest() -> AbstractContextManager[Any]:
    def note(repo: Repo, id: CheckpointId, kind: str, body: Any) -> Any:
        return add_note(repo, lineage.latest(repo, id.run) or id, kind, body)

    return mock.patch.object(api, "add_note", note)


def _pins_are_tags() -> AbstractContextManager[Any]:
    def tags(repo: Repo, run: str) -> tuple[tuple[str, CheckpointId], ...]:
        return tuple((ref.name, ref.id) for ref in list_refs(repo, ("tag",)) if ref.id.run == run)

    return mock.patch.object(rename_run, "check_refs", tags)


BUGS: Final = (
    Bug(
        "chunks are not checked on load",
        lambda: mock.patch.object(chunk_reader.ChunkReader, "_check", lambda *rest: None),
        ranks=False,
    ),
    Bug("the oldest step is the latest", _lowest_step_first),
    Bug("verify finds nothing", _nothing_is_wrong),
    Bug("rm asks nobody", lambda: mock.patch.object(remove, "_run", lambda *rest: iter(()))),
    Bug(
        "an owner that was claimed over saves on",
        lambda: mock.patch.object(claim.Attempt, "check", lambda self: None),
    ),
    Bug(
        "unfinished saves are never closed",
        lambda: mock.patch.object(claim, "close_unfinished", lambda *r, **m: None),
    ),
    Bug(
        "retention takes what it wants",
        lambda: mock.patch.object(
            retention,
            "_still_free",
            lambda snapshot, attempt, plan, going, *_: retention._Judged(
                frozenset(going), plan.trash, snapshot.needs(()), owns=True
            ),
        ),
    ),
    Bug("undelete checks nothing", lambda: mock.patch.object(undelete, "_check", lambda *rest, **more: None)),
    Bug("copies are not shown", lambda: mock.patch.object(findings, "_save", lambda *rest, **more: iter(()))),
    Bug("what was skipped is not told", _nothing_skipped),
    Bug("what is named can be removed", lambda: mock.patch.object(remove, "_refs", lambda *rest: iter(()))),
    # Of operations that histories of several ranks leave out.
    Bug("a rollback changes nothing", _rolled_back_to_latest, ranks=False),
    Bug(
        "a fork takes a name that is in use",
        lambda: mock.patch.object(fork, "_refuse_used", lambda *rest: None),
        ranks=False,
    ),
    Bug(
        "a copy comes before what is there",
        lambda: mock.patch.object(checkpoint_copy, "newest_own", lambda *rest: None),
        ranks=False,
    ),
    Bug("a run is renamed under a pin", _pins_are_tags, ranks=False),
    Bug(
        "ages count from what was saved last",
        lambda: mock.patch.object(calendar, "_newest_s", lambda history: history[0].created_s if history else None),
        ranks=False,
    ),
    Bug(
        "attempts have no first checkpoint",
        lambda: mock.patch.object(calendar.After, "span", lambda self, facts: None),
        ranks=False,
    ),
    Bug(
        "gc does not ask who rests on what",
        lambda: mock.patch.object(gc, "needs_in", lambda *rest: {}),
        ranks=False,
    ),
    Bug(
        "gc --now leaves nothing",
        lambda: mock.patch.object(gc, "_last_restorable", lambda *rest: {}),
        ranks=False,
    ),
    Bug(
        "retention does not ask who rests on what",
        lambda: mock.patch.object(catalog.Snapshot, "needs", lambda self, others: {}),
        ranks=False,
    ),
    Bug(
        "a damaged note is passed over",
        lambda: mock.patch.object(facts, "unread", lambda id, noted: ""),
        ranks=False,
    ),
    Bug(
        "a missing manifest is a save that was cut off",
        lambda: mock.patch.object(lost.Witnesses, "lost", lambda self, id, known="": ""),
        ranks=False,
    ),
    Bug(
        "a repair replaces what fits its own place's manifest",
        lambda: mock.patch.object(repair_plan._Search, "_leave_out", lambda *rest: None),
        ranks=False,
    ),
    Bug(
        "a repair reads nothing back", lambda: mock.patch.object(repair, "_read_back", lambda *rest: None), ranks=False
    ),
    Bug("a repair puts nothing", lambda: mock.patch.object(repair, "_is_right", lambda one: True), ranks=False),
    Bug("a note goes to the latest", _noted_on_the_latest, ranks=False),
    Bug("a step is the newest attempt's", _newest_attempt_first, ranks=False),
)


def histories(
    examples: int,
    number: int | None,
    *,
    steps: int = STEPS,
    shrink: bool = False,
    product: type[OperatorRules] = Product,
) -> None:
    """Runs so many histories; AssertionError, or what the product raised, where one contradicts the model. `number`:
    the seed; None: always the same histories."""
    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=number is None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.normal,
        print_blob=False,
    )
    machine = type("Histories", (product,), {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_state_machine_as_test(seed(number)(machine) if number is not None else machine, settings=chosen)


def caught(bug: Bug, examples: int, number: int | None, product: type[OperatorRules] = Product) -> str:
    """What contradicts the model while the bug is there; empty if nothing does."""
    with bug.patch():
        try:
            if product is Product:
                run_directed()
            histories(examples, number, product=product)
        except Exception as error:  # noqa: BLE001 - any contradiction will do, the product's own errors too
            return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def main(arguments: list[str] | None = None) -> int:
    parser = options(MODULE, __doc__, bugs=True)
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--ranks", action="store_true", help="jobs of one to four ranks")
    chosen = parser.parse_args(arguments)
    product: type[OperatorRules] = RankProduct if chosen.ranks else Product
    result_header = ResultHeader(MODULE, arguments, seed=chosen.seed, packages=["numpy", "hypothesis"])
    counted.clear()
    contradictions = []
    try:
        if not chosen.ranks:
            run_directed()
        histories(chosen.examples, chosen.seed, product=product)
    except Exception as error:  # noqa: BLE001 - told below, and by the exit status
        history = "\n".join(getattr(error, "__notes__", ()))  # the steps, as Hypothesis tells them
        contradictions.append(f"{type(error).__name__}: {error}\n{history}".rstrip())
    counts = dict(counted)
    seeded = [bug for bug in BUGS if bug.ranks or not chosen.ranks]
    bugs = {} if chosen.no_bugs else {bug.name: caught(bug, 200, chosen.seed, product) for bug in seeded}
    report = {
        "histories": counts.pop("histories", 0),
        "steps": counts.pop("steps", 0),
        "rules": dict(sorted(counts.items())),
        "findings": contradictions,
        "bugs_seeded": len(bugs),
        "bugs_caught": sum(bool(how) for how in bugs.values()),
        "bugs": bugs,
    }
    deliver(result_header.result(report), chosen.json)
    return 1 if contradictions or not all(bugs.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
