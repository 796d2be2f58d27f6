"""Short histories that random ones come to rarely, by the same rules and the same model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from campaigns.corruption.repairs import run_repairs
from campaigns.stateful.machine import Product
from campaigns.stateful.world import Process
from tenuto.maintenance import gc, repair
from tenuto.maintenance.repair_plan import plan_repair
from tenuto.maintenance.repair_sources import Sources
from tenuto.repo.format import object_names
from tenuto.repo.notes import add_note
from tenuto.store.memory import MemoryStore


class Drawn:
    """Draws what a history says, in its order, instead of something random."""

    def __init__(self, *values: Any) -> None:
        self._values = iter(values)

    def draw(self, strategy: Any) -> Any:
        return next(self._values)


def others_rest_on_what_goes(one: Product) -> None:
    """Retention lets go of checkpoints whose data files later ones name."""
    _train(one, "dedupe", hours=(0, 0, 0))
    one.retain(data=Drawn(one.alive[0]), n=1, pinned_between=False)


def renamed_and_collected(one: Product) -> None:
    """The copies of a renamed run share data files with the originals, which lie in the trash."""
    _train(one, "plain", hours=(0,))
    one.rename(data=Drawn("main"), ended=True)
    one.collect_now()


def hours_apart(one: Product) -> None:
    """Ages count from the older one of the two newest: of three checkpoints that lie two hours apart all stay."""
    _train(one, "plain", hours=(2, 2))
    one.keep_by_hand(data=Drawn("main", False), which="within", n=2, ended=True)


def gone_back_and_back_again(one: Product) -> None:
    """A step that two attempts have saved means the one on the line of training, which need not be the newer one's."""
    _train(one, "plain", hours=(0, 0))
    first, _, last = sorted(one.model.committed)
    one.roll_back(data=Drawn("main", first), force=False, ended=True)
    _train(one, "plain", hours=(0,))
    one.roll_back(data=Drawn("main", last), force=False, ended=True)
    _train(one, "plain", hours=(), back=1)


def a_damaged_note(one: Product) -> None:
    """What a note may have said of a checkpoint is not known while it cannot be read: retention keeps it."""
    _train(one, "plain", hours=(0, 0, 0))
    first, repo = min(one.model.committed), one.world.repo
    add_note(repo, first, "metric", {"loss": 0.5})
    (note,) = one.world.names(object_names.notes_directory(first))
    one.world.flip(note, 60, 1)
    one.retain(data=Drawn(one.alive[0]), n=1, pinned_between=False)
    assert repo.exists(first), "what cannot be read is not judged"
    _repair(one, {})
    one.world.flip(note, 60, 1)


def a_missing_manifest(one: Product) -> None:
    """Training goes on beside a checkpoint that has lost its manifest, gc leaves it, and a backup brings it back."""
    _train(one, "plain", hours=(0, 0))
    last, repo = max(one.model.committed), one.world.repo
    one.end(data=Drawn(one.alive[0]), killed=False)
    backup = dict(one.world.store.place.objects)
    del one.world.store.place.objects[last.manifest]
    gc.execute(repo, gc.plan_gc(repo, now=True))
    process = Process(one.world, last.run)
    process.open("latest", takeover=False)
    process.save()
    process.close()
    there = {name for name in backup if name.startswith(f"{last.directory}/")}
    assert there - {last.manifest} == set(one.world.names(last.directory)), "nothing of it was freed"
    _repair(one, backup)
    assert repo.exists(last), "the backup has it"
    one.world.store.place.objects.clear()
    one.world.store.place.objects.update(backup)  # the model knows nothing of what has followed


def _repair(one: Product, backup: Mapping[str, Any]) -> None:
    copy = MemoryStore(f"backup of {one.world.store.name}")
    copy.place.objects.update(backup)
    with Sources.of(one.world.repo, [copy.url] if backup else []) as sources:
        repair.execute(sources, plan_repair(sources))


DIRECTED: Final[Sequence[Callable[[Product], None]]] = (
    others_rest_on_what_goes,
    renamed_and_collected,
    hours_apart,
    gone_back_and_back_again,
    a_damaged_note,
    a_missing_manifest,
)


def _train(one: Product, encoding: Any, *, hours: Sequence[int], back: int = 0) -> None:
    """Resumes from the newest, or so many checkpoints before it, and saves; then again, so many hours later each."""
    one.resume(data=Drawn(("main", 0)), back=back, fresh=False, takeover=False, encoding=encoding)
    for between in hours:
        one.save(data=Drawn(one.alive[0]), count=1, hours=between, point=None)


def followers_repaired() -> None:
    """A tier keeps what the primary has only in its trash, of the same or of another line of training, and a store
    alters what is put: a repair changes nothing that fits its own place's manifest, and counts nothing that it has not
    read back."""
    tally = run_repairs(6, 1, names=("followed", "set back", "lying"), log=lambda text: None)
    assert not tally.violations, tally.violations[0]


def run_directed() -> None:
    """Runs each of them; raises what contradicts the model."""
    for history in DIRECTED:
        one = Product()
        try:
            history(one)
            one.everything_matches_the_model()
        finally:
            one.teardown()
    followers_repaired()
