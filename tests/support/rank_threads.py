"""Ranks of one job as threads of this process: the same protocol over a board in memory, and no start-up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tenuto.ranks.agreement import Agreement
from tenuto.ranks.contract import Settings
from tenuto.ranks.kv.in_process import InProcessKVStore, ThreadRanks

Result = TypeVar("Result")
DEADLINE_S = 60.0


def on_ranks(count: int, work: Callable[[Agreement], Result]) -> list[Result]:
    """What `work` returns on each rank; raises what the first rank that failed has raised."""
    found = outcomes(count, work)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


def outcomes(count: int, work: Callable[[Agreement], Any]) -> Sequence[Any]:
    """What `work` returns or raises on each rank."""
    settings = Settings(beat_s=0.05, dead_after_s=30, answer_s=10)

    def agreed(ranks: ThreadRanks) -> Any:
        with Agreement.open(ranks, {"run": "main"}, DEADLINE_S, settings) as agreement:
            return work(agreement)

    return together(count, agreed)


def together(count: int, work: Callable[[Any], Any]) -> Sequence[Any]:
    """What `work` returns or raises on each rank, each a thread."""
    kv_store = InProcessKVStore()
    found: list[Any] = [None] * count

    def run(rank: int) -> None:
        try:
            found[rank] = work(ThreadRanks(rank, count, kv_store))
        except BaseException as error:  # noqa: BLE001 - told to the test
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return found
