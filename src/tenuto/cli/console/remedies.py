"""What `tenuto run` does to a repository between two starts of its training: roll back, repair, save what is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tenuto.telemetry.last_words import LastWords

Report = Callable[[str], None]


def roll_back(words: LastWords, before: int) -> int | None:
    """Has the run go on from its newest healthy checkpoint before a step, and returns that one's step; None where there
    is none. Raises TenutoError."""
    from tenuto.history.rollback import LONGEST, execute, plan_rollback
    from tenuto.repo.health import newest_healthy
    from tenuto.repo.repository import Repo
    from tenuto.store.registry import open_store

    repo = Repo.open(open_store(words.where))
    to = newest_healthy(repo, words.run, before=before)
    if to is None:
        return None
    execute(repo, plan_rollback(repo, words.run, to, reason=words.message[:LONGEST]))
    return to.step


def repair(words: LastWords) -> str:
    """Repairs what is damaged in the run's repository, and returns in words how much. Raises TenutoError."""
    from tenuto.maintenance.repair import execute
    from tenuto.maintenance.repair_plan import plan_repair
    from tenuto.maintenance.repair_sources import Sources
    from tenuto.repo.repository import Repo
    from tenuto.store.registry import open_store
    from tenuto.units import count

    with Sources.of(Repo.open(open_store(words.where)), ()) as sources:
        plan = plan_repair(sources)
        if not plan.repairs:
            return "after a repair that found nothing to repair from"
        return f"after the repair of {count(len(execute(sources, plan).repaired), 'object')}"


def flush(places: Sequence[str], emergency: Sequence[str], report: Report) -> str | None:
    """Writes the newest state that dead processes have left in memory to these repositories, for each of their runs;
    where one does not take it, or does not answer, to the first of these emergency places that does. Returns in words
    what was saved. Raises TenutoError."""
    from tenuto.errors import NotARepository, OwnershipError, TenutoError, in_words
    from tenuto.maintenance.emergency import flush_anywhere

    saved = []
    for where in places:
        try:
            saved += _flushed(where, report, watched=bool(emergency))
        except (TenutoError, OSError) as error:
            if isinstance(error, NotARepository) and not emergency:
                continue
            if isinstance(error, OwnershipError) or not emergency:
                raise
            report(f"{where} does not take what is left in memory: {in_words(error)}")
            saved += filter(None, [flush_anywhere(emergency, report)])
    return f"saved from memory: {', '.join(saved)}" if saved else None


def _flushed(where: str, report: Report, *, watched: bool) -> list[str]:
    """Returns what was written. `watched`: raises DeadlineExceeded where the store does not get on."""
    from functools import partial

    from tenuto.concurrency.deadlines import while_moving, within
    from tenuto.engine.memory_tier.listing import images
    from tenuto.maintenance.emergency import AFTER_S, BYTES_PER_S
    from tenuto.maintenance.flush import execute, plan_flush
    from tenuto.repo.repository import Repo
    from tenuto.store.registry import open_store
    from tenuto.store.wrappers.watched import WatchedStore

    def work() -> list[str]:
        repo = Repo.open(store)
        plans = [plan for run in repo.runs() if (plan := plan_flush(repo, run)).chosen]
        return [str(one.id) for plan in plans if (one := execute(repo, plan, report=report)) is not None]

    if not watched:
        store = open_store(where)
        return work()
    opened = within(AFTER_S, f"asking {where}", partial(open_store, where), subject=where)
    store = moving = WatchedStore(opened)
    seconds = AFTER_S + sum(one.bytes for one in images()) / BYTES_PER_S
    return while_moving(seconds, f"writing to {where}", work, lambda: moving.moved_s, subject=where)
