"""Compares the store with the model, through what a user would ask: verify, latest, load."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from campaigns.stateful.model import Model
from campaigns.stateful.world import World
from tenuto.api.save_load import load
from tenuto.engine.read.choose import CheckpointLeaves, restore_checkpoint
from tenuto.errors import CheckpointNotFound, CorruptionError, NothingRestorable, RunNotFound
from tenuto.maintenance.findings import Finding
from tenuto.maintenance.verify import execute, plan_verify
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Manifest
from tenuto.repo.lineage import walk
from tenuto.repo.notes import notes
from tenuto.state.contract import Prepared
from tenuto.state.restore.match import match_state

GRACE_S: Final = 10 * 3600.0


def check_world(world: World, model: Model, runs: Iterable[str]) -> None:
    """Raises AssertionError where the two differ."""
    for run in runs:
        found, expected = list(walk(world.repo, run)), list(model.walk(run))
        assert found == expected, f"I4: the walk of {run} is {found}, the model's {expected}"
        _check_load(world, model, run, expected)
    for id in model.committed:
        _check_checkpoint(world, model, id)
        texts = [note.body["text"] for note in notes(world.repo, id) if note.kind == "text"]
        assert texts == model.texts.get(id, []), f"the notes on {id} are {texts}"
    _check_findings(world, model)
    for place, objects in model.copies.items():
        for name, data in objects.items():
            there = world.store.place.objects.get(name)
            assert there is not None and there[0] == data, f"I6: {name} below the copy {place} was touched"


def _check_load(world: World, model: Model, run: str, line: list[CheckpointId]) -> None:
    whole = [id for id in line if id not in model.damaged]
    try:
        restored = load(world.store, run=run)
    except NothingRestorable:
        # Copies alone are nothing to begin from either: what had been there is said to be lost.
        copies = any(place.startswith(f"runs/{run}/") for place in model.copies)
        assert not whole and (line or model.of_run(run) or copies), f"{run} has {whole} to restore"
        return
    except (CheckpointNotFound, RunNotFound):
        assert not line and not model.of_run(run), f"{run} has {line}, and load finds none"
        return
    assert whole, f"{run} loads {restored.checkpoint.id}; the model holds {line}, of which {model.damaged} are damaged"
    assert restored.checkpoint.id == whole[0], f"I3: {run} loads {restored.checkpoint.id}, not {whole[0]}"
    model.check_state(whole[0], restored.state)
    skipped = [id for id, _ in restored.skipped]
    assert skipped == line[: line.index(whole[0])], f"skipped {skipped} without being told why, or too many"


def _check_checkpoint(world: World, model: Model, id: CheckpointId) -> None:
    try:
        state = restore_checkpoint(world.repo, id, _prepare).state
    except CorruptionError as error:
        assert id in model.damaged, f"I3: {id} is whole, and is refused: {error}"
        names = model.damaged[id]
        assert any(name.rpartition("/")[2] in str(error) for name in names), f"{error} does not name {names}"
        return
    assert id not in model.damaged, f"I5: {model.damaged[id]} was read without notice"
    model.check_state(id, state)


def _prepare(manifest: Manifest, leaves: CheckpointLeaves) -> Prepared:
    return match_state(manifest.tree, leaves.private, leaves.specs)


def _check_findings(world: World, model: Model) -> None:
    """Exactly what the model expects, told apart by what a finding says."""
    report = execute(world.repo, plan_verify(world.repo), threads=1)
    assert set(report.checked) == set(model.committed), f"verified {report.checked}"
    errors = {finding.object for finding in report.errors}
    expected = {name for names in model.damaged.values() for name in names}
    assert errors == expected, f"errors at {errors}, damage at {expected}: {[str(one) for one in report.errors]}"
    harmed = set(model.damaged) - set(model.trash)
    assert set(report.damaged()) == harmed, f"damaged are {report.damaged()}, not {harmed}"
    told: dict[str, set[Any]] = {}
    for finding in report.findings:
        if finding.severity == "info":
            told.setdefault(_means(finding), set()).add(finding.id or finding.object)
    copies = told.pop("copy", set())
    unfinished, removed = told.pop("unfinished", set()), told.pop("removed", set())
    assert unfinished == set(model.unfinished), f"unfinished are {unfinished}, not {set(model.unfinished)}"
    assert removed == set(model.trash), f"removed are {removed}, not {set(model.trash)}"
    marked = told.pop("marked", set())
    # Of what others rest on a mark says nothing yet.
    alone = {id for id in model.marked if not model.needers(id, lambda one: True)}
    assert alone <= marked, f"gc marked {marked}, not {alone}"
    # A mark on what was closed or brought back since speaks of nothing any more; the next gc clears it away.
    assert not marked & set(model.committed), f"marks on checkpoints: {marked}"
    removing = told.pop("removing", set())
    assert removing <= model.removing, f"removals of {removing} were begun, and {model.removing} by who has died"
    assert not told, f"not expected: {told}"
    for place in model.copies:
        assert any(_lies_in(one, place) for one in copies), f"the copy {place} is not shown"
    for one in copies:
        assert any(_lies_in(one, place) for place in model.copies), f"{one} is shown as a copy and is none"


def _means(finding: Finding) -> str:
    for words, meaning in (
        ("an unfinished save", "unfinished"),
        ("removed;", "removed"),
        ("a removal was begun", "removing"),
        ("gc has found", "marked"),
        ("a copied directory", "copy"),
        ("is a copy of", "copy"),
        ("a copy of", "copy"),
        ("not written by Tenuto", "copy"),
    ):
        if words in finding.message:
            return meaning
    return str(finding)


def _lies_in(one: Any, place: str) -> bool:
    name = one.directory if isinstance(one, CheckpointId) else str(one)
    return name == place or name.startswith(f"{place}/")
