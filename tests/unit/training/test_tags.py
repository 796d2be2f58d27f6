"""Tags: the step is saved, kept, and found by its name."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

import tenuto
from support.said import said
from support.tiny_training import Gate, state, steps_of, train
from tenuto import every, keep, on
from tenuto.errors import CheckpointNotFound, StoreFull, UsageError
from tenuto.maintenance.facts import gather_facts


def test_a_tagged_step_is_saved_kept_and_found(place: Path) -> None:
    one = state()
    with tenuto.Checkpointer(place, one, save=every(steps=4), keep=keep.latest(1)) as ckpt:
        for step in ckpt.steps(12):
            train(one)
            if step == 1:
                ckpt.log(tag="baseline", loss=3.0)
            if step == 3:
                ckpt.log(tag=["first", "fourth"])
    assert steps_of(place) == [12, 4, 2]
    there = tenuto.Repository(place)
    assert {name: id.step for name, id in there.tags().items()} == {"baseline": 2, "first": 4, "fourth": 4}
    assert dict(there.manifest(there.find(step="baseline")).metrics) == {"loss": 3.0}
    assert tenuto.load(place, step="baseline").state["n"] == 2
    facts = {facts.id.step: facts for facts in gather_facts(there.repo, "main")}
    reasons = {v.id.step: v.reason for v in keep.latest(1).decide(list(facts.values()))}
    assert reasons[4] == "tagged first, fourth"


def test_outside_a_step_a_tag_goes_to_the_last_completed_one(place: Path) -> None:
    one = state()
    with tenuto.Checkpointer(place, one, save=on.end(), keep=keep.latest(1)) as ckpt:
        ckpt.log(tag="untrained")
        for _ in ckpt.steps(3):
            train(one)
        ckpt.log(tag="done")
    assert steps_of(place) == [3, 0]
    assert {name: id.step for name, id in tenuto.Repository(place).tags().items()} == {"done": 3, "untrained": 0}


def test_a_tag_moves_and_what_it_leaves_may_go(place: Path) -> None:
    one = state()
    with tenuto.Checkpointer(place, one, save=every(steps=1), keep=keep.latest(1)) as ckpt:
        for step in ckpt.steps(6):
            train(one)
            if step in (1, 3):
                ckpt.log(tag="best")
                ckpt.wait(60)
    assert steps_of(place) == [6, 4]
    tenuto.Repository(place).untag("best")
    with pytest.raises(CheckpointNotFound, match="no tag 'best'"):
        tenuto.Repository(place).untag("best")


def test_resume_from_a_tag_and_a_fork_from_another_runs(place: Path) -> None:
    one = state()
    with tenuto.Checkpointer(place, one, save=every(steps=1), keep=keep.all()) as ckpt:
        for step in ckpt.steps(4):
            train(one)
            if step == 1:
                ckpt.log(tag="two")
    for run, parent in (("main", "main/a0001/2"), ("fork", "main/a0001/2")):
        again = state()
        with tenuto.Checkpointer(place, again, run=run, resume_from="two", save=on.end()) as ckpt:
            assert list(ckpt.steps(3)) == [2]
            assert again["n"] == 2
        manifest = tenuto.Repository(place).manifest(tenuto.Repository(place).find(run))
        assert str(manifest.parent) == parent
    with tenuto.Checkpointer(place, state(), resume_from="nothing") as ckpt:
        with pytest.raises(CheckpointNotFound, match="neither a step nor a tag"):
            ckpt.restore()


def test_a_tag_on_another_runs_checkpoint_moves_with_a_warning(place: Path) -> None:
    tenuto.save(state(), place, run="a", step=1)
    tenuto.Repository(place).tag("shared", run="a")
    with said("'shared' has moved from a/a0001/1 of another run"):
        with tenuto.Checkpointer(place, state(), run="b") as ckpt:
            for _ in ckpt.steps(1):
                ckpt.log(tag="shared")
    assert tenuto.Repository(place).tags()["shared"].run == "b"


def test_a_save_that_failed_is_not_tagged_and_says_so(gate: Gate, place: Path) -> None:
    gate.failure, gate.failures = StoreFull("full"), -1
    with said("was not saved, and so not tagged best"):
        with tenuto.Checkpointer(gate, state(), save=on.signal()) as ckpt:
            for step in ckpt.steps(2):
                if step == 0:
                    ckpt.log(tag="best")
    assert tenuto.Repository(place).tags() == {}


def test_a_tag_before_restoring_does_not_hide_what_is_there(place: Path) -> None:
    tenuto.save(state(), place, step=7)
    with tenuto.Checkpointer(place, state()) as ckpt:
        with pytest.raises(UsageError, match="nothing was restored"):
            ckpt.log(tag="baseline")
        ckpt.restore()
        ckpt.log(tag="baseline")
    assert tenuto.Repository(place).tags()["baseline"].step == 7


@pytest.mark.parametrize("bad", ["latest", "500", "Baseline", "a/b", "", "end.", 5, [5], ["good", "latest"]])
def test_what_cannot_be_a_tag_is_refused_before_anything_happens(place: Path, bad: object) -> None:
    with tenuto.Checkpointer(place, state(), save=on.signal()) as ckpt:
        for _ in ckpt.steps(1):
            with pytest.raises(UsageError):
                ckpt.log(tag=bad)  # type: ignore[arg-type]
    assert steps_of(place) == []


def test_latest_step(place: Path) -> None:
    with tenuto.Checkpointer(place, state(), save=every(steps=2)) as ckpt:
        assert ckpt.latest_step() is None
        for _ in ckpt.steps(4):
            pass
        ckpt.wait(60)
        assert ckpt.latest_step() == tenuto.Repository(place).latest_step() == 4
    assert tenuto.Repository(place).latest_step("none") is None


def test_a_requested_save_and_a_tag_are_one_save(place: Path) -> None:
    one = state()
    with tenuto.Checkpointer(place, one, save=on.signal()) as ckpt:
        for _ in ckpt.steps(1):
            train(one)
            handle = ckpt.save()
            ckpt.log(tag="asked")
        assert handle.wait(60).step == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ckpt.log(tag="again")
    assert {name: id.step for name, id in tenuto.Repository(place).tags().items()} == {"again": 1, "asked": 1}
    assert np.array_equal(tenuto.load(place, step="again").state["w"], one["w"])


def test_a_damaged_tag_is_put_anew_by_training(tmp_path: Path) -> None:
    place = tmp_path / "damaged"  # verify goes on naming the versions that cannot be read
    for last in (2, 4):
        one = state()
        with tenuto.Checkpointer(place, one, save=every(steps=2), keep=keep.latest(1)) as ckpt:
            for step in ckpt.steps(last):
                train(one)
                if step == last - 1:
                    ckpt.log(tag="best")
        assert tenuto.Repository(place).tags()["best"].step == last
        (place / f"refs/tag/best/{last // 2}.json").write_bytes(b"?")
