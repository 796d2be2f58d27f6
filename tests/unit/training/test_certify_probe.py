"""A process under `tenuto certify`: what means the place that is certified means the scratch place instead."""

import json
from dataclasses import replace

import numpy as np
import pytest

import tenuto
from tenuto.certify.probe import VARIABLE, AtStep, EnoughSteps, current_order, order_of
from tenuto.certify.runner import Certification
from tenuto.certify.verdict import ExactnessVerdict
from tenuto.cli.commands.certify import _show
from tenuto.errors import UsageError
from tenuto.policy.save import Moment, SaveHistory


@pytest.fixture
def places(tmp_path, monkeypatch):
    where, scratch = tmp_path / "where", tmp_path / "scratch"
    order = order_of(str(where), str(scratch), str(tmp_path / "trail"), last=4, save_at=None)
    monkeypatch.setenv(VARIABLE, order.environment()[VARIABLE])
    return where, scratch


def records(place):
    return [json.loads(line) for line in (place.parent / "trail").read_text().splitlines()]


def test_everything_that_is_meant_for_the_place_goes_to_the_scratch_place(places, monkeypatch):
    where, scratch = places
    monkeypatch.chdir(where.parent)
    for name in (where, str(where), "where", where.as_uri(), f"{where}/"):
        tenuto.save({"x": np.ones(2)}, name, run="one-off")
    assert tenuto.load("where", run="one-off").state["x"].tolist() == [1, 1]
    assert tenuto.Repository(where).runs() == ["one-off"]
    with tenuto.open(where, run="one-off") as opened:
        assert list(opened) == ["x"]
    assert scratch.exists() and not where.exists()


def test_what_is_in_the_place_stays_as_it_is(places, monkeypatch):
    where, scratch = places
    monkeypatch.delenv(VARIABLE)
    with tenuto.Checkpointer(where, {"n": 1}) as ckpt:
        ckpt.step_done()
    before = {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in where.rglob("*")}
    order = order_of(str(where), str(scratch), str(where.parent / "trail"), last=2, save_at=1)
    monkeypatch.setenv(VARIABLE, order.environment()[VARIABLE])
    state = {"n": 5}
    with pytest.raises(EnoughSteps), tenuto.Checkpointer(where, state) as ckpt:
        assert ckpt.restore() is None
        monkeypatch.setattr("tenuto.certify.probe.TrailWriter.await_kill", lambda teller, step: None)
        for _ in ckpt.steps(100):
            state["n"] += 1
    assert tenuto.Repository(where).latest().step == 1 and tenuto.load(where).state["n"] == 6
    monkeypatch.delenv(VARIABLE)
    assert tenuto.load(where).state["n"] == 1
    after = {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in where.rglob("*")}
    assert after == before


def test_other_places_are_what_they_are(places, tmp_path):
    tenuto.save({"x": 1}, tmp_path / "other")
    assert tenuto.Repository(tmp_path / "other").latest().step == 0
    assert not places[1].exists()


def test_a_training_tells_its_steps_and_leaves_in_time(places):
    where, scratch = places
    state = {"x": np.zeros(2), "n": 0}
    kept = tenuto.keep.best(1, "val_loss")
    with pytest.raises(EnoughSteps) as leaving:
        with tenuto.Checkpointer(where, state, data=[1, 2], save=tenuto.every(steps=1), keep=kept) as ckpt:
            for _ in ckpt.steps(100):
                state["n"] += next(ckpt.batches)
                ckpt.log(loss=1.0)
    assert leaving.value.code == 0 and not where.exists()
    told = records(scratch)
    assert [one["record"] for one in told] == ["built", "row", "row", "row", "row", "row", "done"]
    rows = told[1:-1]
    assert [(one["step"], one["epoch"], one["start"]) for one in rows] == [
        (0, 0, True),
        (1, 0, False),
        (2, 0, False),
        (3, 1, False),
        (4, 1, False),
    ]
    assert [one["entries"]["n"] for one in rows] == ["0", "1", "3", "4", "6"]
    assert len({one["entries"]["x"] for one in rows}) == 1
    assert rows[1]["batches"] == rows[3]["batches"] != rows[2]["batches"]
    assert told[-1]["certificate"]["exact"] is True
    assert told[-1]["logged"] == ["loss"]
    assert told[-1]["certificate"]["watches"] == {"val_loss": "keep.best(1, 'val_loss', mode='min')"}
    assert tenuto.Repository(scratch).runs() in ([], ["main"])
    assert tenuto.Repository(scratch).latest() is None, "nothing was to be saved"


def test_another_place_and_a_second_checkpointer_are_refused(places, tmp_path):
    with pytest.raises(UsageError, match="not for the WHERE"):
        tenuto.Checkpointer(tmp_path / "other", {})
    assert not (tmp_path / "other").exists()
    assert records(places[1])[-1]["record"] == "refused"
    with tenuto.Checkpointer(places[0], {}):
        with pytest.raises(UsageError, match="more than one"):
            tenuto.Checkpointer(places[0], {}, run="second")


def test_a_variable_that_says_nothing_is_told(monkeypatch, tmp_path):
    for text in ("yes", "{}", '{"where": 1}', "[]"):
        monkeypatch.setenv(VARIABLE, text)
        with pytest.raises(UsageError, match=VARIABLE):
            tenuto.Checkpointer(tmp_path, {})
    monkeypatch.setenv(VARIABLE, "")
    assert current_order() is None


def test_the_step_is_saved_once_also_when_steps_are_counted_in_leaps():
    def wants(step, saved=None):
        return AtStep(5).decide(Moment(step, 0.0), SaveHistory(0.0, 0, saved)).save

    assert [wants(4), wants(5), wants(7), wants(7, saved=4), wants(8, saved=7)] == [False, True, True, True, False]
    assert AtStep(None).decide(Moment(5, 0.0), SaveHistory(0.0)).save is False


def test_certify_says_what_the_policies_go_by_and_nothing_logged(capsys):
    found = Certification(
        verdict=ExactnessVerdict("exact"),
        saved=10,
        last=20,
        ranks=1,
        leaves=3,
        runs=(),
        certificate={},
        uncovered=(),
        not_seen=("an accelerator: the script used none",),
        script=None,
        unlogged={"val_loss": "keep.best(1, 'val_loss', mode='min')"},
        seconds=1.0,
    )
    _show(found)
    out = capsys.readouterr().out
    assert "\nNot seen, so nothing is proven of:\n  -  an accelerator: the script used none\n" in out
    assert out.endswith(
        "Not logged in these 20 steps, though the script's policies use it:\n"
        "  -  val_loss, by keep.best(1, 'val_loss', mode='min')\n"
    )
    _show(replace(found, unlogged={}))
    assert "Not logged" not in capsys.readouterr().out
