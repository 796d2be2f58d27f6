"""What some rank needs and does not find, and another rank's node has: that one puts it into the home, for all.

Nothing is said where every rank finds what it needs, but for one round of messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tenuto.engine.read.copy_packs import copy_packs
from tenuto.errors import CorruptionError, TenutoError
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Manifest
from tenuto.ranks.round import Round
from tenuto.repo.replicated.places import places_of
from tenuto.repo.replicated.replica import exists
from tenuto.repo.replicated.replicated_store import ReplicatedStore
from tenuto.repo.repository import Repo

NOWHERE = -1


def lacking(round: Round, places: ReplicatedStore, needs: Callable[[], Sequence[str]], deadline_s: float) -> list[str]:
    """The packs that some rank needs and does not find, on every rank the same. Raises what `Topic.gather` does."""
    phase = "telling which packs are not found"
    try:
        missed = [name for name in needs() if not places.has(name)]
    except TenutoError:
        missed = []  # it is met again, and told, where they are read
    with round:
        round.send(canonical_json.dumps(missed))
        if round.coordinates:
            said = {name for one in round.gather(deadline_s, phase) for name in canonical_json.loads(one)}
            round.broadcast(canonical_json.dumps(sorted(said)))
        return [str(name) for name in canonical_json.loads(round.receive(deadline_s, phase))]


def dealt(round: Round, places: ReplicatedStore, names: Sequence[str], rank: int, deadline_s: float) -> list[str]:
    """Which of `names` this rank is to put into the home. CorruptionError, on all ranks, where none has one of them."""
    phase = "telling who has the packs that are not found"
    held = [number for number, name in enumerate(names) if any(exists(store, name) for store in places.others)]
    with round:
        round.send(canonical_json.dumps(held))
        if round.coordinates:
            who = [NOWHERE] * len(names)
            for one, numbers in reversed(list(enumerate(round.gather(deadline_s, phase)))):
                for number in canonical_json.loads(numbers):
                    who[number] = one
            round.broadcast(canonical_json.dumps(who))
        who = canonical_json.loads(round.receive(deadline_s, phase))
    if NOWHERE in who:
        name = names[who.index(NOWHERE)]
        raise CorruptionError(
            f"{name} is on no node of this job, nor in {places.url}: it was on one that is not here, or is lost",
            subject=name,
            object=name,
        )
    return [name for name, one in zip(names, who, strict=True) if one == rank]


def hand_over(repo: Repo, manifest: Manifest, names: Sequence[str]) -> None:
    """Copies these packs from this node into the home, and says so. Raises what `copy_packs` does."""
    places = places_of(repo.store)
    assert places is not None, "no place else has anything"

    def told(name: str, nbytes: int) -> None:
        places.warn(f"{name} ({nbytes / 2**20:,.1f} MiB) is put into {places.url}, for ranks that do not find it")

    if names:
        copy_packs(repo, manifest, frozenset(names), places.home, told)


def is_there(places: ReplicatedStore, id: CheckpointId, names: Sequence[str]) -> bool:
    """Whether the home shows them. Listed first: that makes a network file system look anew."""
    there = places.home.children(id.directory).objects
    return all(name.rpartition("/")[2] in there and exists(places.home, name) for name in names)
