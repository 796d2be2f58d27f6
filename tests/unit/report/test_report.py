"""What a report says of a repository."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

import tenuto
from support.reported import CERTIFICATE, LONG, Made, cut, eventful
from tenuto.cli import main
from tenuto.cli.console.output import jsonable
from tenuto.errors import MissingExtra, RunNotFound, UsageError
from tenuto.model.ids import CheckpointId
from tenuto.repo.refs import put_ref
from tenuto.repo.unfinished import abort
from tenuto.report.facts import CheckpointReport, Report
from tenuto.report.lineage import drawing, events
from tenuto.testing.object_store import Bucket, SimulatedObjectStore


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return eventful(tmp_path_factory.mktemp("reported")).report()


def texts(report: Report, level: str = "") -> list[str]:
    return [f"{one.run}: {one.text}" for one in report.attention if level in ("", one.level)]


def save_of(report: Report, run: str, attempt: int, step: int) -> CheckpointReport:
    found = next(one for one in report.runs if one.run == run)
    return next(one for one in found.saves if one.id == CheckpointId(run, attempt, step))


def test_of_each_checkpoint_it_says_what_it_is(seen: Report) -> None:
    latest = save_of(seen, "gpt", 3, 60)
    assert latest.latest and latest.on_line and latest.checked == "verified" and latest.checked_s is not None
    assert "what latest means" in latest.kept and "the last one verified" in latest.kept
    assert latest.timing is not None and latest.timing.write_s == 2.1
    assert 0 < latest.logical < latest.stored
    assert save_of(seen, "gpt", 1, 20).tags == ("best-yet",)
    assert save_of(seen, "gpt", 1, 10).pins == ("paper",) and "pinned" in save_of(seen, "gpt", 1, 10).kept
    assert not save_of(seen, "gpt", 2, 36).on_line
    broken = save_of(seen, "gpt", 1, 5)
    assert broken.damaged and "bytes that were saved are there" in broken.message


def test_of_each_metric_it_says_what_stands_out(seen: Report) -> None:
    metrics = {one.name: one for one in seen.runs[0].metrics}
    assert metrics["loss"].spikes == (CheckpointId("gpt", 2, 35),)
    assert metrics["loss"].nonfinite == (CheckpointId("gpt", 2, 39), CheckpointId("gpt", 2, 40))
    assert metrics["lr"].spikes == metrics["lr"].nonfinite == ()
    assert metrics["val_loss"].mode == "min" and metrics["val_loss"].best is not None
    assert next(iter(metrics)) == "val_loss", "those that policies go by come first"


def test_damage_comes_first(seen: Report) -> None:
    assert texts(seen) == ["gpt: 1 checkpoint is damaged: step 5"]
    assert seen.attention[0].command == f"tenuto verify {seen.where} --run gpt"


def test_nothing_needs_attention_where_nothing_is_wrong(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.save("gpt", range(1, 5))
    assert made.report().attention == ()


def test_a_damaged_latest_says_what_a_resume_takes_instead(tmp_path: Path) -> None:
    made = Made(tmp_path)
    cut(made, made.save("gpt", [1, 2, 3]))
    assert texts(made.report(), "damage") == ["gpt: the latest is damaged: a resume falls back to step 2"]
    for step in (1, 2):
        cut(made, CheckpointId("gpt", 1, step))
    assert texts(made.report(), "damage") == [
        "gpt: the latest is damaged: nothing is left to resume from",
        "gpt: 2 checkpoints are damaged: steps 1, 2",
    ]


def test_what_was_not_verified_for_a_week_is_a_warning(tmp_path: Path) -> None:
    made = Made(tmp_path)
    newest = made.save("gpt", [1, 2])
    made.now += timedelta(days=6)
    assert not made.report().attention
    made.now += timedelta(days=2)
    assert texts(made.report(), "warning") == ["gpt: none of its checkpoints was ever verified"]
    made.note(newest, "verified")
    assert not made.report().attention
    made.now += timedelta(days=9)
    assert texts(made.report(), "warning") == ["gpt: last verified 9 days ago"]


def test_a_save_that_is_late_is_a_warning_while_somebody_trains(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.save("gpt", range(1, 9), ends="never")
    made.now += timedelta(minutes=25)
    found = made.report()
    assert found.runs[0].trainer == "training" and found.runs[0].usual_s == 600 and not found.attention
    made.now += timedelta(minutes=10)
    assert texts(made.report()) == ["gpt: the latest checkpoint is 35 min old; usually one is saved every 10 min"]


def test_a_process_that_died_is_a_warning(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.save("gpt", range(1, 4), ends="dead")
    made.now += timedelta(hours=5)
    (one,) = texts(made.report(), "warning")
    assert one.endswith("ended without finishing; the latest checkpoint is 5 h old")


def test_failed_saves_since_the_latest_are_a_warning(tmp_path: Path) -> None:
    made = Made(tmp_path)
    newest = made.save("gpt", [1, 2, 3])
    abort(made.repo, replace(newest, step=4), "4" * 32)
    assert texts(made.report()) == ["gpt: 1 save failed since the latest checkpoint: step 4"]
    made.save("gpt", [5], newest)
    assert not made.report().attention


def test_a_spike_and_a_nan_count_among_the_newest(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.save("gpt", range(1, 31), metrics={28: {"val_loss": 99.0}, 30: {"val_loss": float("inf")}})
    assert texts(made.report()) == [
        "gpt: val_loss not finite at step 30",
        "gpt: a spike in val_loss at step 28",
    ]


@pytest.mark.parametrize("name", ["val_loss", "train/loss"])
def test_of_a_falling_metric_it_has_the_spikes_that_the_repository_has(tmp_path: Path, name: str) -> None:
    made = Made(tmp_path)
    values = {step: 2.0 / step for step in range(1, 41)} | {20: 30.0, 33: float("nan"), 36: 9.0}
    made.save("gpt", range(1, 41), metrics={step: {name: value} for step, value in values.items()})
    found = made.report()
    (metric,) = [one for one in found.runs[0].metrics if one.name == name]
    spikes = tenuto.Repository(tmp_path).spikes(name, "gpt")
    assert [(one.step, one.kind) for one in spikes] == [(20, "spike"), (33, "nan"), (36, "spike")]
    assert [id.step for id in metric.spikes] == [one.step for one in spikes if one.kind != "nan"]
    assert metric.diverges is None and f"gpt: a spike in {name} at step 36" in texts(found, "note")


def test_a_loss_that_diverges_is_a_warning(tmp_path: Path) -> None:
    made = Made(tmp_path)
    values = {step: 2.0 / step for step in range(1, 31)} | {15: 20.0} | {step: float(step) for step in range(28, 36)}
    made.save("gpt", range(1, 36), metrics={step: {"loss": value} for step, value in values.items()})
    found = made.report()
    (metric,) = [one for one in found.runs[0].metrics if one.name == "loss"]
    assert metric.diverges == CheckpointId("gpt", 1, 28)
    assert [id.step for id in metric.spikes] == [one.step for one in tenuto.Repository(tmp_path).spikes("loss", "gpt")]
    assert texts(found) == ["gpt: loss diverges since step 28"]
    made.save(
        "gpt", range(36, 39), CheckpointId("gpt", 1, 35), metrics={step: {"loss": 0.06} for step in range(36, 39)}
    )
    assert "warning" not in {one.level for one in made.report().attention}


@pytest.mark.filterwarnings("error:overflow encountered")
def test_values_that_became_nan_are_damage_and_infinite_norms_are_marked(tmp_path: Path) -> None:
    state = {"w": np.ones(64), "b": np.full(64, 1e200)}
    with tenuto.Checkpointer(tmp_path, state, save=tenuto.every(steps=1)) as ckpt:
        for _ in ckpt.steps(4):
            if ckpt.step == 3:
                state["w"][1] = np.nan
    found = tenuto.Repository(tmp_path).report()
    newest = found.runs[0].newest
    assert newest is not None and newest.unhealthy and newest.health is not None and newest.health.norm == np.inf
    assert "main: 1 leaf with NaN or infinities (w): step" in " ".join(texts(found, "damage"))
    page = found.to_html()
    assert "Norm of all values" in page and "unhealthy, or not a finite number" in page
    assert jsonable(asdict(newest))["health"]["norm"] == "inf"


def test_a_resume_that_is_not_exact_is_a_note(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.save("gpt", [1], certificate={**CERTIFICATE, "verdict": "not exact"})
    assert texts(made.report(), "note") == ["gpt: a resume from the latest is not exact"]


def test_damaged_refs_manifests_and_records_are_reported_and_stop_nothing(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.save("gpt", [1, 2, 3])
    put_ref(made.repo, "tag", "best-yet", CheckpointId("gpt", 1, 2))
    (tmp_path / "refs/tag/best-yet/1.json").write_bytes(b"?")
    (tmp_path / CheckpointId("gpt", 1, 1).manifest).write_bytes(b"?")
    (tmp_path / "runs/gpt/a0001/attempt.json").write_bytes(b"?")
    found = made.report()
    assert any("a ref is damaged" in one for one in texts(found, "damage"))
    assert any("step 1" in one for one in texts(found, "damage"))
    assert save_of(found, "gpt", 1, 1).damaged
    assert "damaged" in found.to_html()


def test_runs_are_chosen_by_name(seen: Report, tmp_path: Path) -> None:
    made = eventful(tmp_path)
    assert [run.run for run in made.report(["SMALL"]).runs] == ["small"]
    with pytest.raises(RunNotFound, match="gpt, small") as caught:
        made.report(["smal"])
    assert caught.value.hint == "did you mean 'small'?"


def test_an_empty_repository_has_a_report(tmp_path: Path) -> None:
    found = Made(tmp_path).report()
    assert found.runs == found.attention == ()
    assert "There are no runs yet" in found.to_html()


def test_the_recorded_policy_says_what_is_kept_and_what_goes(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.save("gpt", range(1, 6), certificate={**CERTIFICATE, "keep": "keep.latest(2) | keep.every(steps=3)"})
    (run,) = made.report().runs
    assert run.keep == "keep.latest(2) | keep.every(steps=3)"
    assert [(one.kept, one.goes) for one in run.saves] == [
        ((), "not among the newest 2; before the first milestone, step 3"),
        ((), "not among the newest 2; before the first milestone, step 3"),
        (("the milestone of step 3",), ""),
        (("2nd newest of 2",), ""),
        (("what latest means", "newest of 2"), ""),
    ]


@pytest.mark.parametrize("more", [{"encoding": "dedupe"}, {}])
def test_of_a_training_it_has_the_recorded_timings(tmp_path: Path, more: dict[str, str]) -> None:
    kept = tenuto.keep.latest(2)
    with tenuto.Checkpointer(tmp_path, {"w": np.zeros(1000)}, save=tenuto.every(steps=1), keep=kept, **more) as ckpt:  # type: ignore[arg-type]
        for step in ckpt.steps(3):
            ckpt.log(loss=1.0 - step)
    found = tenuto.Repository(tmp_path).report()
    assert found.runs[0].newest is not None and found.runs[0].latest == found.runs[0].checkpoints[-1].id
    assert found.runs[0].keep == "keep.latest(2)"
    newest = found.runs[0].newest
    assert newest is not None and newest.timing is not None and newest.timing.held_s > 0
    assert found.runs[0].trainer == "finished" and "Time of a save" in found.to_html()


def test_of_an_object_store_it_reads_small_objects_alone(tmp_path: Path) -> None:
    bucket = Bucket()
    made, local = Made(SimulatedObjectStore(bucket)), Made(tmp_path)
    for one in (made, local):
        one.note(one.save("gpt", range(1, 21)), "verified")
    bucket.forget()
    found = made.report()
    assert replace(found.runs[0], saves=()) == replace(local.report().runs[0], saves=())
    assert [one.kept for one in found.runs[0].saves] == [one.kept for one in local.report().runs[0].saves]
    assert bucket.counts()["get"] < 5 * 20 and not any(name.endswith(".safetensors") for name in read_from(bucket))
    assert sum(name.endswith("manifest.json") for name in read_from(bucket)) <= 20 + 2


def test_of_a_fork_each_manifest_is_read_once_too() -> None:
    bucket = Bucket()
    made = Made(SimulatedObjectStore(bucket))
    made.save("zoo", range(1, 11))
    made.save("ape", range(6, 11), CheckpointId("zoo", 1, 5))
    bucket.forget()
    assert [len(one.line) for one in made.report().runs] == [5, 10]
    assert sum(name.endswith("manifest.json") for name in read_from(bucket)) <= 15 + 2 * 2


def read_from(bucket: Bucket) -> list[str]:
    return [request.name for request in bucket.requests if request.verb == "get"]


def test_as_json_it_is_the_same_tree(seen: Report) -> None:
    document = json.loads(json.dumps(jsonable(asdict(seen)), allow_nan=False))
    assert document["runs"][0]["latest"] == {"run": "gpt", "attempt": 3, "step": 60}
    assert document["runs"][0]["saves"][38]["metrics"]["loss"] in (1.003, "nan")


# The page.


def test_nothing_in_a_repository_becomes_markup(tmp_path: Path) -> None:
    hostile = "<script>alert('x')</script>\"onload='y'"
    page = eventful(tmp_path, hostile).report().to_html(title=f"</title>{hostile}")
    assert "<script>alert" not in page and "\"onload='" not in page
    assert page.count("<script>") == 1 and "&lt;script&gt;alert" in page


def test_metrics_of_any_values_are_drawn(tmp_path: Path) -> None:
    made, largest = Made(tmp_path), 1.7e308
    odd = {
        step: {
            "huge": largest * (-1) ** step,
            "never finite": float("nan") if step % 2 else float("inf"),
            "tiny": 5e-324 * step,
            **({"once": 1.0} if step == 3 else {}),
            "$x_1^{": 1.0,
        }
        for step in range(1, 20)
    }
    made.save("gpt", odd, metrics=odd)  # type: ignore[arg-type]
    made.save("one", [2**50], metrics={2**50: {"huge": 0.0}})
    made.save("none", [0], metrics={0: {}})
    page = made.report().to_html()
    assert page.count("<figure>") == 7 + 2 + 3 + 2 + 2 + 2
    assert "never finite" in page and "$x_1^{" in page


def test_a_style_of_the_users_changes_no_page(seen: Report) -> None:
    import matplotlib

    before = seen.to_html()
    with matplotlib.rc_context({"lines.linewidth": 9, "axes.facecolor": "red", "text.usetex": True}):
        assert seen.to_html() == before


def test_a_page_names_nothing_to_fetch(seen: Report) -> None:
    page = seen.to_html()
    assert "http://" not in page.replace("http://www.w3.org/", "") and "https://" not in page
    assert 'src="' not in page and "@import" not in page
    assert "default-src 'none'" in page


def test_equal_facts_make_equal_pages(seen: Report) -> None:
    assert seen.to_html() == seen.to_html()


def test_no_id_is_twice_in_a_page(seen: Report) -> None:
    ids = re.findall(r' id="([^"]*)"', seen.to_html())
    assert len(ids) == len(set(ids))


def test_a_page_of_hundreds_of_checkpoints_is_small(seen: Report) -> None:
    rows = sum(len(run.saves) for run in seen.runs)
    assert len(seen.to_html()) < 130_000 + 1_500 * rows


def test_only_a_report_is_replaced(seen: Report, tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    assert seen.write(path) == path.stat().st_size
    assert seen.write(path, title="again") and "again" in path.read_text()
    assert [one.name for one in tmp_path.iterdir()] == ["out.html"]
    path.write_text("<html>mine</html>")
    with pytest.raises(UsageError, match="is not a report"):
        seen.write(path)
    assert path.read_text() == "<html>mine</html>"
    with pytest.raises(tenuto.errors.StoreError, match="cannot be written"):
        seen.write(tmp_path / "nowhere" / "out.html")
    (tmp_path / "directory").mkdir()
    with pytest.raises(UsageError, match="is not a report"):
        seen.write(tmp_path / "directory")


def test_a_report_that_cannot_be_given_its_name_leaves_nothing(
    seen: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*paths: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(tenuto.errors.StoreError, match="cannot be written"):
        seen.write(tmp_path / "out.html")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["jinja2", "matplotlib"])
def test_without_its_libraries_it_names_the_extra(seen: Report, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in [one for one in sys.modules if one.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=name) as caught:
        seen.to_html()
    assert "report" in str(caught.value.hint)


# Lines of training.


def test_lines_are_drawn_where_they_part(seen: Report) -> None:
    found = drawing(seen.runs)
    assert found is not None
    kinds = [one.kind for one in found.segments]
    assert kinds.count("fork") == 1 and "behind" in kinds and "branch" in kinds
    assert all(0 <= x <= 100 for one in found.segments for x in (one.x1, one.x2))
    assert all(0 <= y <= found.height for one in found.segments for y in (one.y1, one.y2))
    shapes = [one.shape for one in found.marks]
    assert shapes.count("latest") == 2 and shapes.count("damaged") == 1 and shapes.count("tagged") == 2
    assert [name for name, _, _ in found.names] == ["gpt", "small"], "a fork stands below what it was forked from"
    assert drawing(seen.runs[::-1]) == found


def test_the_same_stands_there_in_words(seen: Report) -> None:
    assert list(events(seen.runs)) == [
        "Run gpt went back to step 34 from step 40 of attempt 2: 6 checkpoints left behind.",
        "Tags of run gpt: best-yet is step 20.",
        "Run small was forked from run gpt at step 50.",
        f"Tags of run small: {LONG} is step 51.",
    ]
    assert drawing(()) is None


def test_the_newest_checkpoint_is_the_latest_and_nothing_is_vouched_for_that_was_never_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.engine.save.job.now_text", lambda: "2030-01-02T03:04:05Z")
    monkeypatch.chdir(tmp_path)
    weights = {"w": np.zeros(4)}
    with tenuto.Checkpointer("ckpts", weights, save=tenuto.every(steps=2), keep=tenuto.keep.all()) as ckpt:
        for _ in ckpt.steps(6):
            weights["w"] += 1
    page = tenuto.Repository("ckpts").report().to_html()
    assert "step 6 of main" in page and "step 2 of main" not in page
    assert "Nothing found in what is recorded; nothing was verified yet of main" in page
    with pytest.raises(SystemExit):
        main(["report", "ckpts"])
    assert capsys.readouterr().out.endswith("nothing was verified yet of main\n")
    with pytest.raises(SystemExit):
        main(["verify", "ckpts", "--note"])
    assert "Nothing needs attention" in tenuto.Repository("ckpts").report().to_html()
