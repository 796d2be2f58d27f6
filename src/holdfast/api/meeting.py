"""The ranks of a job meeting for one matter alone: a single save, or a single load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from holdfast.api.company import Company, leaving_if_raised
from holdfast.api.together import attempt_of
from holdfast.errors import RanksMissing
from holdfast.events import Emitter
from holdfast.plan.assign import Strategy
from holdfast.ranks.contract import Ranks
from holdfast.repo.attempts import Attempt
from holdfast.repo.records import encode_attempt
from holdfast.repo.repository import Repo
from holdfast.store.contract import Where


@contextmanager
def meeting(
    ranks: Ranks,
    where: Where,
    run: str,
    emitter: Emitter,
    timeout_s: float,
    *,
    call: Literal["save", "load"],
    facts: Mapping[str, str],
    writers: Strategy = "balanced",
) -> Iterator[tuple[Company, Repo]]:
    """This process among the ranks, and the repository, for as long as the block lasts: what is raised within it is
    told to the others. Raises what `Company.meet` does."""
    try:
        company, repo = Company.meet(ranks, where, run, emitter, timeout_s, call=call, facts=facts, writers=writers)
    except RanksMissing as error:
        alone = f"every rank of the job calls holdfast.{call}; one that is to {call} by itself: ranks=holdfast.Solo()"
        raise RanksMissing(
            error.message, subject=error.subject, hint=alone, ranks=error.ranks, phase=error.phase
        ) from error
    with leaving_if_raised(company):
        yield company, repo
    company.part(timeout_s, well=True)


def agreed_attempt(repo: Repo, company: Company, find: Callable[[], tuple[Attempt, int]]) -> tuple[Attempt, int]:
    """What `find` gives on the coordinator, an attempt and a step, on all ranks, which save in one place."""
    attempt, step = _told(repo, company, find)
    try:
        company.see(attempt)
    except BaseException:
        attempt.release()
        raise
    return attempt, step


def _told(repo: Repo, company: Company, find: Callable[[], tuple[Attempt, int]]) -> tuple[Attempt, int]:
    with company.agreement.topic("claim") as topic:
        if not company.coordinates:
            number, _, record = topic.hear(company.timeout_s, "the claim of the run").partition(b"\n")
            return attempt_of(repo, record), int(number)
        attempt, step = find()
        try:
            topic.announce(b"%d\n" % step + encode_attempt(attempt.record))
        except BaseException:
            attempt.release()
            raise
        return attempt, step
