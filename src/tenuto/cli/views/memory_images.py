"""Lists the images in this node's memory."""

from __future__ import annotations

import functools
import itertools
import pwd
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tenuto.cli.console import output
from tenuto.cli.console.output import Columns
from tenuto.engine.staging.slots import OtherUsers, parse_name
from tenuto.errors import TenutoError
from tenuto.model.ids import attempt_key

if TYPE_CHECKING:
    from tenuto.engine.memory_tier.eligibility import EligibleImage
    from tenuto.engine.memory_tier.listing import FoundImage
    from tenuto.repo.repository import Repo

    Verdict = EligibleImage | str
    Rows = Sequence[tuple[FoundImage, Verdict]]


def judged(
    repo: Repo | None, run: str | None, users: Iterable[int | None] = (None,)
) -> list[tuple[FoundImage, Verdict]]:
    """Returns the images of `users` (None: this user) with verdicts, of one repository or all.

    Each image is judged by its own repository, if that can be reached; another user's claim of where that lies is not
    followed.
    """
    from tenuto.engine.memory_tier.listing import images
    from tenuto.model.ids import run_key

    opened: dict[str, Repo | str] = {} if repo is None else {repo.id: repo}
    out: list[tuple[FoundImage, Verdict]] = []
    for found in itertools.chain.from_iterable(map(images, users)):
        repository, _, of = found.slot.parent.partition("/")
        if (repo is not None and repository != repo.id) or (run is not None and of != run_key(run)):
            continue
        ours = found.slot.user is None
        if ours and repository not in opened and found.footer is not None and not found.alive:
            opened[repository] = _reached(found.footer.where, repository)
        out.append((found, _judge(found, opened.get(repository))))
    return out


def _judge(found: FoundImage, repo: Repo | str | None) -> Verdict:
    from tenuto.maintenance.flush import judge_found, unfit

    why = unfit(found)
    if found.slot.user is not None:
        return why or f"for user {user_name(found.user)} to resume from, or to flush"
    if why or repo is None:
        return why
    return repo if isinstance(repo, str) else judge_found(repo, found)


def _reached(where: str, repository: str) -> Repo | str:
    """Returns the repository found at `where`, or why it cannot be used."""
    from tenuto.repo.repository import Repo
    from tenuto.store.registry import open_store

    if not where:
        return "where its repository lies is not known; name it: tenuto ls --memory WHERE"
    try:
        repo = Repo.open(open_store(where))
    except TenutoError as error:
        return f"its repository cannot be read: {error.message}"
    return repo if repo.id == repository else f"the repository at {where} is another one now"


def words(found: FoundImage, verdict: Verdict, rows: Rows) -> str:
    """Describes an image. `rows`: everything listed, which includes the images of other ranks of the same state."""
    from tenuto.maintenance.flush import lacking

    if isinstance(verdict, str):
        return verdict
    if verdict.durable:
        return "it is durable, too"
    others = lacking(found, [one for one, _ in rows if not one.alive and one.user == found.user])
    if not others:
        return "a restart resumes from it"
    which = f"rank {others[0]} has" if len(others) == 1 else f"ranks {', '.join(map(str, others[:8]))} have"
    return f"a restart resumes from it where {which} it too: not here"


@functools.cache
def user_name(user: int) -> str:
    """Returns the user's name, or the number if this machine does not know it."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def report_hidden_users(hidden: OtherUsers) -> None:
    """Prints which memory of other users is not shown."""
    from tenuto.units import count

    for why in hidden.refused:
        output.story(why)
    if hidden.closed:
        output.story(
            f"not shown: what {count(hidden.closed, 'other user')} may have in memory; ask as that user, or root"
        )


def table(rows: Rows) -> None:
    """Prints the images, if there are any."""
    from tenuto.units import seconds, size

    if not rows:
        return
    ranks = any(parse_name(found.slot.name)[2] > 1 for found, _ in rows)
    columns = Columns(
        (
            *("RUN", *(["RANK"] if ranks else []), "ATTEMPT", "STEP", "SIZE", "SEALED"),
            *("USER", "OWNER", "PID", "STATE", "WHERE"),
        ),
        right=frozenset({"STEP", "SIZE", "PID"}),
        dispensable=("WHERE", "SIZE", "PID"),
    )
    for found, verdict in rows:
        footer = found.footer
        columns.add(
            found.slot.parent.partition("/")[2],
            *([_rank(found)] if ranks else []),
            attempt_key(footer.holder.attempt) if footer is not None else "",
            str(footer.id.step) if footer is not None else "",
            size(found.bytes),
            f"{seconds(footer.age_s)} ago" if footer is not None else "",
            user_name(found.user),
            "alive" if found.alive else "dead",
            str(found.pid) if found.pid is not None else "",
            words(found, verdict, rows),
            footer.where if footer is not None else "",
            style="gone" if isinstance(verdict, str) else "",
        )
    columns.print()


def _rank(found: FoundImage) -> str:
    rank, _, ranks = parse_name(found.slot.name)
    return f"{rank} of {ranks}"


def document(found: FoundImage, verdict: Verdict, rows: Rows) -> dict[str, Any]:
    repository, _, run = found.slot.parent.partition("/")
    footer = found.footer
    rank, _, ranks = parse_name(found.slot.name)
    return {
        "name": found.name,
        "run": run,
        "rank": rank,
        "ranks": ranks,
        "repository": repository,
        "bytes": found.bytes,
        "user": user_name(found.user),
        "uid": found.user,
        "owner": "alive" if found.alive else "dead",
        "pid": found.pid,
        "sealed": footer is not None,
        "checkpoint": footer.id if footer is not None else None,
        "attempt": footer.holder.attempt if footer is not None else None,
        "age_s": round(footer.age_s, 3) if footer is not None else None,
        "created": footer.created if footer is not None else None,
        "where": footer.where if footer is not None else None,
        "adoptable": not isinstance(verdict, str),
        "state": words(found, verdict, rows),
    }
