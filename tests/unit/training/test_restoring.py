"""What is restored, what is passed over and why, and what bad input gets."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.said import said
from support.tiny_training import flip, flip_leaf, state, steps_of
from tenuto import every, keep
from tenuto.engine.save.job import ManifestDetails
from tenuto.engine.save.saver import Saver
from tenuto.errors import (
    CheckpointNotFound,
    CorruptionError,
    FormatTooNew,
    NotARepository,
    NothingRestorable,
    RunNotFound,
    StateMismatch,
    StoreDenied,
    TenutoError,
)
from tenuto.events import CandidateSkipped, Event
from tenuto.repo.lineage import latest, walk
from tenuto.repo.ownership.claim import claim
from tenuto.repo.repository import Repo
from tenuto.state.encode.flattener import flatten
from tenuto.store.registry import open_store

ALL = keep.latest(100)


class Recorded:
    def __init__(self) -> None:
        self.skipped: list[CandidateSkipped] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, CandidateSkipped):
            self.skipped.append(event)


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Three checkpoints: w is the step, everywhere."""
    place = tmp_path / "trained"
    one = state()
    with tenuto.Checkpointer(place, one, save=every(steps=1), keep=ALL) as ckpt:
        for step in ckpt.steps(3):
            one["w"][:] = step + 1
            one["n"] = step + 1
    return place


LAST = "runs/main/a0001/step-00000003"


@pytest.mark.parametrize(
    "damage",
    [
        lambda place: flip_leaf(place, f"{LAST}/*.safetensors", "w"),
        lambda place: flip(place, f"{LAST}/*.safetensors", 100),
        lambda place: flip(place, f"{LAST}/*.index", 700),
        lambda place: flip(place, f"{LAST}/manifest.json", 40),
        lambda place: next(iter(place.glob(f"{LAST}/*.safetensors"))).unlink(),
        lambda place: next(iter(place.glob(f"{LAST}/*.index"))).unlink(),
        lambda place: os.truncate(place / LAST / "rank-00000.safetensors", 4100),
        lambda place: shutil.copy(place / "runs/main/a0001/step-00000002/rank-00000.safetensors", place / LAST),
    ],
    ids=["leaf", "header", "index", "manifest", "no pack", "no index", "short pack", "another's pack"],
)
def test_i3_a_damaged_checkpoint_is_passed_over_loudly_for_the_one_before(
    trained: Path, damage: Callable[[Path], None]
) -> None:
    damage(trained)
    sink = Recorded()
    with said("step 3 of run main is damaged and was passed over for step 2"):
        restored = tenuto.load(trained, sinks=[sink])
    assert restored.step == 2
    assert np.all(restored.state["w"] == 2)
    assert [str(id) for id, _ in restored.skipped] == ["main/a0001/3"]
    assert [event.id.step for event in sink.skipped] == [3]
    one = state()
    with (
        tenuto.Checkpointer(trained, one, save=every(steps=1), keep=ALL) as ckpt,
        said("step 3 of run main is damaged and was passed over for step 2"),
    ):
        assert list(ckpt.steps(3)) == [2]
        assert np.all(one["w"] == 2)
    assert np.all(tenuto.load(trained).state["w"] == 2)
    assert tenuto.load(trained).checkpoint.attempt == 2
    with pytest.raises(CorruptionError):
        _load_exactly(trained)


def _load_exactly(place: Path) -> None:
    from tenuto.engine.read.choose import restore_checkpoint
    from tenuto.model.ids import CheckpointId
    from tenuto.state.restore.match import match_state

    repo = tenuto.Repository(place).repo
    restore_checkpoint(
        repo, CheckpointId("main", 1, 3), lambda manifest, index: match_state(manifest.tree, index.private, index.specs)
    )


def test_a_damaged_leaf_is_named_with_its_object_and_offset(trained: Path) -> None:
    flip_leaf(trained, f"{LAST}/*.safetensors", "w")
    with pytest.raises(
        CorruptionError,
        match=r"w is damaged: .*rank-00000.safetensors, 4000 bytes from offset \d+, are not what was saved",
    ) as told:
        tenuto.load(trained, step=3)
    assert told.value.subject == "w"
    assert "tenuto verify" in (told.value.hint or "")


def test_nothing_starts_from_scratch_where_checkpoints_exist_and_none_is_whole(trained: Path) -> None:
    flip_leaf(trained, "runs/main/a0001/step-*/*.safetensors", "w")
    with pytest.raises(NothingRestorable, match="none of them is whole"):
        tenuto.load(trained)
    with tenuto.Checkpointer(trained, state()) as ckpt, pytest.raises(NothingRestorable):
        ckpt.steps(5)
    assert steps_of(trained) == [3, 2, 1]


def test_a_line_whose_beginning_is_gone_is_told_and_never_started_from_scratch(trained: Path) -> None:
    with tenuto.Checkpointer(trained, state(), resume_from=1, save=every(steps=100)) as ckpt:
        ckpt.restore()
        ckpt.step_done()
    shutil.rmtree(trained / "runs/main/a0001/step-00000001")
    with pytest.raises(NothingRestorable, match="such as main/a0001/3"):
        tenuto.load(trained)
    with tenuto.Checkpointer(trained, state()) as ckpt, pytest.raises(NothingRestorable):
        ckpt.steps(5)
    assert tenuto.load(trained, step=2).step == 2


def test_a_copied_step_or_attempt_is_never_chosen(trained: Path) -> None:
    attempt = trained / "runs/main/a0001"
    shutil.copytree(attempt / "step-00000003", attempt / "step-00000009")
    shutil.copytree(attempt, trained / "runs/main/a0007")
    assert tenuto.load(trained).checkpoint.id.attempt == 1
    assert tenuto.load(trained).step == 3
    one = state()
    with tenuto.Checkpointer(trained, one, save=every(steps=1), keep=keep.latest(1)) as ckpt:
        assert list(ckpt.steps(4)) == [3]
    assert tenuto.load(trained).step == 4
    assert (attempt / "step-00000009" / "rank-00000.safetensors").exists()


@pytest.mark.parametrize(
    "progress", [{}, {"epoch": 1, "batch": 1}, {"step": 3}, {"step": "4"}, {"step": 4, "epoch": -1}, {"step": True}]
)
def test_a_checkpoint_that_does_not_say_how_far_training_was_is_never_taken_for_step_0(
    trained: Path, progress: dict[str, Any]
) -> None:
    repo = Repo.open(open_store(trained))
    saver = Saver(repo, "main")
    saver.attempt = claim(repo, "main", latest(repo, "main"))
    saver.save(flatten(state()), 4, wait=True, about=ManifestDetails(progress=progress)).wait()
    saver.attempt.release()
    saver.close()
    assert tenuto.load(trained).step == 4, "its state can be had"
    one = state()
    sink = Recorded()
    with tenuto.Checkpointer(trained, one, sinks=[sink]) as ckpt:
        restored = ckpt.restore()
        assert restored is not None and (restored.step, ckpt.step, one["n"]) == (3, 3, 3)
    assert [(skip.id.step, "its progress says" in skip.reason) for skip in sink.skipped] == [(4, True)]
    with (
        tenuto.Checkpointer(trained, state(), resume_from=4) as ckpt,
        pytest.raises(CorruptionError, match="progress"),
    ):
        ckpt.restore()


def test_a_one_off_save_says_its_step(trained: Path) -> None:
    tenuto.save(state(), trained, step=7)
    with tenuto.Checkpointer(trained, state()) as ckpt:
        ckpt.restore()
        assert (ckpt.step, ckpt.epoch) == (7, 0)


@pytest.mark.parametrize("when", ["before the claim is put", "after it"])
def test_i4_what_the_owner_before_commits_at_its_end_is_gone_on_from(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    shutil.move(trained / LAST, tmp_path / "not yet committed")

    def meanwhile(repo: Repo, run: str, parent: Any, *, before_put: Callable[[], None], **options: Any) -> Any:
        def committing() -> None:
            if when == "after it":
                before_put()
            if not (trained / LAST).exists():
                shutil.move(tmp_path / "not yet committed", trained / LAST)
            if when != "after it":
                before_put()

        return claim(repo, run, parent, before_put=committing, **options)

    monkeypatch.setattr("tenuto.repo.ownership.claim.claim", meanwhile)
    one = state()
    with tenuto.Checkpointer(trained, one, save=every(steps=1), keep=ALL) as ckpt:
        for _ in ckpt.steps(4):
            assert one["n"] == 3
            one["n"] = 4
    last = 2 if when == "before the claim is put" else 3
    repo = Repo.open(open_store(trained))
    assert repo.attempts("main") == list(range(1, last + 1))
    assert [str(id) for id in walk(repo, "main")] == [f"main/a000{last}/4", *(f"main/a0001/{n}" for n in (3, 2, 1))]


def test_an_explicit_step_is_restored_and_forks_the_line(trained: Path) -> None:
    one = state()
    with tenuto.Checkpointer(trained, one, resume_from=1, save=every(steps=1), keep=ALL) as ckpt:
        assert list(ckpt.steps(2)) == [1]
        one["w"][:] = 50
    latest = tenuto.Repository(trained).latest()
    assert str(latest) == "main/a0002/2"
    assert [str(id) for id in tenuto.Repository(trained).walk()] == ["main/a0002/2", "main/a0001/1"]


def test_loading_is_partial_where_that_is_wanted_and_reports(trained: Path) -> None:
    restored = tenuto.load(trained, into={"w": np.zeros(1000, np.float32)})
    assert restored.report.skipped == ("n",) or "n" not in restored.state
    with pytest.raises(StateMismatch, match="w"):
        tenuto.load(trained, into={"w": np.zeros(7, np.float32)})
    loose = tenuto.load(trained, into={"w": np.zeros(7, np.float32), "new": 3}, strict=False)
    assert loose.state["new"] == 3
    assert "new" in loose.report.missing
    renamed = tenuto.load(trained, into={"weights": np.zeros(1000, np.float32)}, rename={"w": "weights"})
    assert np.all(renamed.state["weights"] == 3)
    only = tenuto.load(trained, include="n")
    assert only.state == {"n": 3}


def test_a_choice_that_leaves_nothing_is_told(trained: Path) -> None:
    for into in (None, {"w": np.zeros(1000, np.float32)}):
        with pytest.raises(StateMismatch, match="leave nothing"):
            tenuto.load(trained, into=into, include="weight")
    assert tenuto.load(trained, include="weight", strict=False).state == {}


def test_what_is_not_there_is_told_with_what_is(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="no checkpoint of step 9; the nearest are 1, 2, 3"):
        tenuto.load(trained, step=9)
    with pytest.raises(RunNotFound, match="main"):
        tenuto.load(trained, run="mian")
    with pytest.raises(NotARepository, match="no Tenuto repository"):
        tenuto.load(tmp_path)
    with pytest.raises(NotARepository) as told:
        tenuto.load(trained / "runs")
    assert str(trained) in (told.value.hint or "")
    (tmp_path / "file").write_text("x")
    with pytest.raises(TenutoError, match="file"):
        tenuto.load(tmp_path / "file")


def test_loading_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotARepository):
        tenuto.load(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_a_newer_format_says_what_it_needs(trained: Path) -> None:
    from tenuto.model import canonical_json

    path = trained / "tenuto.json"
    found = canonical_json.loads(path.read_bytes())
    del found["digest"]
    found["format"] = 2
    path.write_bytes(canonical_json.seal(found))
    with pytest.raises(FormatTooNew, match="2"):
        tenuto.load(trained)


@pytest.mark.skipif(os.geteuid() != 0, reason="changes to another user, which root alone can")
def test_a_place_that_may_not_be_written_still_loads(trained: Path) -> None:
    for path in [trained, *trained.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    temporary = Path(os.environ.get("PYTEST_DEBUG_TEMPROOT") or tempfile.gettempdir()).resolve()
    for parent in trained.parents:
        if parent != temporary and parent.is_relative_to(temporary):
            parent.chmod(0o755)  # pytest's own directories are for their owner alone
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.seteuid(65534)
            assert tenuto.load(trained).step == 3
            try:
                tenuto.save({"a": 1}, trained)
            except StoreDenied as error:
                status = 0 if str(trained) in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


def test_one_off_saves_number_themselves_and_go_on_from_what_was_loaded(tmp_path: Path) -> None:
    place = tmp_path / "one-off"
    assert [tenuto.save({"v": number}, place).step for number in range(3)] == [0, 1, 2]
    assert tenuto.load(place).state == {"v": 2}
    assert tenuto.load(place, step=0).state == {"v": 0}
    forked = tenuto.save({"v": "fork"}, place, step=1)
    assert (forked.attempt, forked.step) == (2, 1)
    assert [str(id) for id in tenuto.Repository(place).walk()] == ["main/a0002/1", "main/a0001/0"]
    other = tenuto.save([1, "root"], place, run="Other")
    assert other.run == "other"
    assert tenuto.load(place, run="OTHER").state == [1, "root"]


def test_the_pack_opens_with_the_safetensors_library(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    values = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": {"c": np.array(7), "d": np.zeros((0, 4), np.int8)},
    }
    made = tenuto.save(values, tmp_path / "r")
    found = load_file(tmp_path / "r" / made.id.directory / "rank-00000.safetensors")
    assert sorted(found) == ["a", "b/c", "b/d"]
    assert np.array_equal(found["a"], values["a"])
    assert found["b/c"] == 7 and found["b/d"].shape == (0, 4)
