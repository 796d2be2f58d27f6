"""What the operator's catalog costs with 100,000 checkpoints in 100 runs: making it, a page of a query, and `latest`.

Every checkpoint has the manifest that a training would have put, and every tenth a metric that was noted later; data
files play no part. Times are the middle of the rounds. A page is `tenuto ls --where … --sort … --limit 20` in a process
that has everything imported, with its look at the repository.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grown_repository import grow_runs
from harness import Result, arguments, median_interval, note, report, workplace

import tenuto
from tenuto.history import catalog_cache
from tenuto.history.query import Order, Query
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

RUNS, STEPS = 100, 1_000
ROUNDS = 5
PAGE_MS, LATEST_MS, MANIFEST_US = 200.0, 50.0, 10.0
LATEST_OF = ("run-007", "run-042", "run-077", "run-099")
QUERIES = (None, "val_loss < 0.5 and step > 300", "run == 'run-007' and not damaged", "age < '3d' and tag is None")


def make(where: Path) -> Repo:
    repo = Repo.create_or_open(open_store(where))

    def put(name: str, data: bytes) -> None:
        path = where / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    grow_runs(repo, [f"run-{number:03d}" for number in range(RUNS)], range(1, STEPS + 1), put)
    return repo


def main() -> None:
    options = arguments(__doc__ or "", gib=0.0, leaves=1, rounds=ROUNDS)
    result = Result("catalog", {}, 0, speeds=False)
    with workplace(options) as place:
        os.environ["XDG_CACHE_HOME"] = str(place / "cache")
        repo = make(place / "ckpts")
        number = RUNS * STEPS
        note(f"made {number:,} checkpoints")
        time.sleep(2.5)  # what has just changed is looked at again

        def timed(what: str, work: Callable[[], Any]) -> Any:
            begun = time.perf_counter()
            found = work()
            result.seconds.setdefault(what, []).append(time.perf_counter() - begun)
            return found

        def made_anew() -> None:
            catalog_cache._throw_away(catalog_cache.path_of(repo))
            assert len(catalog_cache.query(repo, limit=20)) == 20

        began = time.process_time()
        timed("made anew", made_anew)
        result.facts["processor us a manifest, made anew"] = (time.process_time() - began) * 1e6 / number
        for _ in range(options.rounds):
            for text in QUERIES:
                where = None if text is None else Query.parse(text)
                order = None if text is None else Order.parse("val_loss")
                timed("a page", lambda w=where, o=order: catalog_cache.query(repo, w, o, 20))
            timed("a complete look", lambda: catalog_cache.query(repo, limit=20, refresh=True))
            for run in LATEST_OF:
                timed("latest", lambda run=run: tenuto.Repository(place / "ckpts").latest(run))
        result.facts["bytes of the catalog for each checkpoint"] = (
            sum(one.stat().st_size for one in (place / "cache").rglob("*.sqlite")) / number
        )
        for what, limit in (("a page", PAGE_MS), ("latest", LATEST_MS)):
            found = median_interval([one * 1e3 for one in result.seconds[what]])
            result.judge_value(f"{what}, {number:,} <= {limit:g} ms", found, at_most=limit, unit="ms")
        each = median_interval([one * 1e6 / number for one in result.seconds["made anew"]])
        result.judge_value(f"made anew <= {MANIFEST_US:g} us a manifest", each, at_most=MANIFEST_US, unit="us")
        report(result, options, place)


if __name__ == "__main__":
    main()
