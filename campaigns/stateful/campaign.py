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
from campaigns.stateful.machine import Product
from campaigns.stateful.operator_rules import OperatorRules, counted
from campaigns.stateful.ranks import RankProduct
from tenuto.engine.read import choose, chunk_reader
from tenuto.maintenance import findings, remove, retention, undelete, verify
from tenuto.repo.ownership import claim

MODULE: Final = "campaigns.stateful"
STEPS: Final = 25


@dataclass(frozen=True)
class Bug:
    """`ranks`: whether histories of several ranks can tell too: there no bits rot."""

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
    from tenuto.repo.repository import Repo

    steps = Repo.steps
    return mock.patch.object(Repo, "steps", lambda self, run, attempt: sorted(steps(self, run, attempt)))


def _nothing_is_wrong() -> AbstractContextManager[Any]:
    execute = verify.execute

    def lenient(*arguments: Any, **options: Any) -> Any:
        return replace(execute(*arguments, **options), findings=())

    return replacing(execute, lenient)


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
            retention, "_still_free", lambda snapshot, attempt, plan, going, *_: (frozenset(going), plan.trash)
        ),
    ),
    Bug("undelete checks nothing", lambda: mock.patch.object(undelete, "_check", lambda *rest, **more: None)),
    Bug("copies are not shown", lambda: mock.patch.object(findings, "_save", lambda *rest, **more: iter(()))),
    Bug("what was skipped is not told", _nothing_skipped),
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
        verbosity=Verbosity.quiet,
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
        histories(chosen.examples, chosen.seed, product=product)
    except Exception as error:  # noqa: BLE001 - told below, and by the exit status
        contradictions.append(f"{type(error).__name__}: {error}")
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
