"""The checkpoints on whose packs a save rests."""

from __future__ import annotations

from collections.abc import Sequence

from tenuto.errors import CorruptionError
from tenuto.model.ids import CheckpointId
from tenuto.repo.repository import Repo
from tenuto.repo.tombstones import is_tombstoned


def usable_bases(
    repo: Repo, id: CheckpointId, bases: Sequence[CheckpointId], *, through: CheckpointId | None = None
) -> tuple[CheckpointId, ...]:
    """Returns the checkpoints of which the save `id` may name packs, after its `begin.json` has named them.

    through: a committed checkpoint that rests on all the other `bases` itself, as its manifest says. While it is there
    and nobody is removing it, nothing frees the packs of those either, even if they lie in the trash; and nothing has
    to be asked of each. So a steady save makes two calls: the tombstones of the one before it, and its manifest.

    Whoever frees packs announces that first, and looks afterwards for all that names them: it finds this save, or its
    announcement is found here, or what it has left behind.
    """
    if not bases:
        return ()
    if through is not None and _is_there(repo, id, through):
        return tuple(bases)
    elsewhere = {base.run for base in bases if base.run != id.run}
    forked = bool(elsewhere) and forked_from_others(repo, id.run)
    candidates = (base for base in bases if base != through and (base.run == id.run or forked))
    return tuple(base for base in candidates if _is_there(repo, id, base))


def _is_there(repo: Repo, id: CheckpointId, base: CheckpointId) -> bool:
    if (base.run, base.attempt) != (id.run, id.attempt):
        repo.store.settle(base.manifest)  # what this attempt has committed is durable
    # In this order: a removal takes its tombstone back when the manifest is gone.
    return not is_tombstoned(repo, base) and repo.exists(base)


def data_files_of(bases: Sequence[CheckpointId]) -> str:
    more = f", and of {len(bases) - 3} more" if len(bases) > 3 else ""
    return f"data files of {', '.join(map(str, sorted(bases, reverse=True)[:3]))}{more}"


def forked_from_others(repo: Repo, run: str) -> bool:
    """Returns whether an attempt of `run` went on from another run. Only such a run may rest on packs of another: its
    retention looks there. An attempt whose record is damaged counts."""
    for number in repo.attempts(run):
        try:
            record = repo.find_attempt(run, number)
        except CorruptionError:
            return True
        if record is not None and record.parent is not None and record.parent.run != run:
            return True
    return False


def forks_besides(repo: Repo, run: str) -> list[str]:
    """Returns the other runs whose saves may rest on packs of `run`."""
    return [other for other in repo.runs() if other != run and forked_from_others(repo, other)]
