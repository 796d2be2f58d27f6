import json
import re

import numpy as np

import tenuto
from tenuto import every, keep
from tenuto.cli.commands import keep as keep_command
from tenuto.maintenance.verify import assert_whole
from tenuto.model.ids import CheckpointId
from tenuto.repo.lineage import latest
from tenuto.repo.notes import add_note
from tenuto.repo.ownership.claim import claim
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store


def test_keep_shows_what_would_go_and_does_nothing(cli, made):
    assert cli("keep", made, "--run", "gpt", "--latest", "2", "--best", "1:loss", "--dry-run") == (
        0,
        """\
run gpt: keep.latest(2) | keep.best(1, 'loss', mode='min')
  CHECKPOINT  VERDICT    FREES  REASON
  a0002/7     kept              what latest means; newest of 2; the best by loss
                                (0.142857) of the current line of training
  a0002/5     kept              the last one verified; 2nd newest of 2
  a0001/8     kept              the best by loss (0.125), on a line of training
                                that was left behind
  a0001/6     goes     198 KiB  not among the newest 2, on a line of training
                                that was left behind; not the best by loss
                                (0.166667; the best is 0.125)
  a0001/4     goes     198 KiB  not among the newest 2; not the best by loss
                                (0.25; the best is 0.125)
  a0001/2     goes     198 KiB  not among the newest 2; not the best by loss
                                (0.5; the best is 0.125)
3 checkpoints of 6 would go, 594 KiB
""",
        "",
    )


def test_keep_moves_into_the_trash_and_says_how_long_it_can_come_back(cli, place):
    status, out, err = cli("keep", place, "--run", "gpt", "--every-steps", "4", "--yes")
    assert (status, out.splitlines()[-1]) == (0, "2 checkpoints moved into the trash")
    assert cli("ls", place, "--trash")[1].splitlines()[0] == "run gpt: 2 in the trash, 397 KiB"
    assert err.splitlines() == [
        "`tenuto undelete` can bring it back for 24 h; `tenuto gc` frees its space after 25 h",
        "hint: to free it now: tenuto gc /ckpts --now",
    ]
    assert cli("undelete", place, "gpt/a0001/2", "gpt/a0001/6")[0] == 0
    assert_whole(Repo.open(open_store(place)))


def test_keep_now_frees_at_once(cli, place, monkeypatch):
    asked = []
    monkeypatch.setattr(keep_command, "agreed", lambda question, yes: asked.append(question) or True)
    status, out, err = cli("keep", place, "--run", "gpt", "--every-steps", "4", "--now")
    assert (status, err) == (0, "")
    assert re.fullmatch(r"2 checkpoints freed, \d+ KiB", out.splitlines()[-1])
    assert asked[0].startswith("Free 2 checkpoints, ") and asked[0].endswith("There is no way to bring them back.")
    assert cli("ls", place, "--trash")[1] == ""
    assert not (place / "runs/gpt/a0001/step-00000002/rank-00000.safetensors").exists()


def test_keep_frees_as_the_runs_own_attempt_and_changes_nothing_of_latest(cli, place):
    status, out, err = cli("keep", place, "--run", "gpt", "--every-steps", "4", "--yes", "--json")
    found = json.loads(out)
    assert (status, err, found["policy"], found["dry_run"]) == (0, "", "keep.every(steps=4)", False)
    assert [row["step"] for row in found["removed"]] == [2, 6]
    repo = Repo.open(open_store(place))
    assert latest(repo, "gpt") == CheckpointId("gpt", 2, 7)
    assert repo.committed("gpt", 1) == [8, 4] and repo.committed("gpt", 2) == [7, 5]
    assert repo.attempt("gpt", 3).parent == CheckpointId("gpt", 2, 7)
    assert_whole(repo)
    claim(repo, "gpt", CheckpointId("gpt", 2, 7), wait_s=0).release()


def test_keep_claims_nothing_where_nothing_goes(cli, place):
    status, out, _ = cli("keep", place, "--run", "gpt", "--latest", "9", "--yes")
    assert (status, out.splitlines()[-1]) == (0, "0 checkpoints of 6 would go, 0 B")
    assert Repo.open(open_store(place)).attempts("gpt") == [1, 2]


def test_keep_refuses_a_run_that_is_trained_now(cli, place):
    repo = Repo.open(open_store(place))
    attempt = claim(repo, "gpt", CheckpointId("gpt", 2, 7))
    status, _, err = cli("keep", place, "--run", "gpt", "--latest", "1", "--yes")
    attempt.release()
    assert status == 13
    assert "is in use" in err
    assert len(repo.committed("gpt", 1)) == 4


def test_keep_asks_and_needs_a_policy(cli, made):
    status, _, err = cli("keep", made, "--run", "gpt", "--latest", "1")
    assert (status, "--yes" in err) == (2, True)
    assert cli("keep", made, "--run", "gpt")[0] == 2
    assert cli("keep", made, "--run", "gpt", "--best", "two:loss")[0] == 2
    assert cli("keep", made, "--run", "gpt", "--latest", "0")[0] == 2
    assert cli("keep", made, "--run", "gtp", "--latest", "1")[0] == 11


def test_best_takes_metrics_with_colons_and_modes(cli, place):
    add_note(Repo.open(open_store(place)), CheckpointId("gpt", 2, 7), "metric", {"a:b": 1.0})
    for text, policy in (
        ("2:a:b:max", "keep.best(2, 'a:b', mode='max')"),
        ("1:a:b", "keep.best(1, 'a:b', mode='min')"),
    ):
        out = cli("keep", place, "--run", "gpt", "--best", text, "--every-hours", "24", "--dry-run", "--json")[1]
        assert json.loads(out)["policy"] == f"{policy} | keep.every(hours=24)"


def test_best_refuses_a_mode_that_is_none_and_a_metric_that_nobody_logged(cli, made):
    assert cli("keep", made, "--run", "gpt", "--best", "1:val_loss:lowest", "--yes") == (
        2,
        "",
        "error: --best 1:val_loss:lowest: 'lowest' is neither min nor max\nhint: --best 1:val_loss:min\n",
    )
    assert cli("keep", made, "--run", "gpt", "--best", "1:val_los", "--yes") == (
        2,
        "",
        "error: no checkpoint of run 'gpt' has a metric 'val_los'; metrics that there are: late, loss, val_loss\n"
        "hint: did you mean 'val_loss'?\n",
    )
    assert len(Repo.open(open_store(made)).committed("gpt", 1)) == 4


def test_best_without_a_mode_goes_by_the_one_that_training_recorded(cli, tmp_path):
    weights = {"w": np.arange(4.0)}
    with tenuto.Checkpointer(
        tmp_path / "ckpts", {"weights": weights}, save=every(steps=1), keep=keep.best(9, "acc", mode="max")
    ) as ckpt:
        for step in ckpt.steps(3):
            ckpt.log(acc=step / 10)
    out = cli("keep", tmp_path / "ckpts", "--best", "1:acc", "--dry-run", "--json")[1]
    assert json.loads(out)["policy"] == "keep.best(1, 'acc', mode='max')"


def test_keep_by_the_calendar_and_within_a_budget(cli, made):
    options = [
        "--latest",
        "1",
        "--best",
        "1:loss",
        "--hourly",
        "24",
        "--monthly",
        "12",
        "--yearly",
        "10",
        "--within",
        "36h",
        "--after",
        "attempt",
    ]
    status, out, err = cli("keep", made, "--run", "gpt", *options, "--budget", "700KiB", "--dry-run", "--json")
    found = json.loads(out)
    assert (status, err, found["warnings"]) == (0, "", [])
    assert found["policy"] == (
        "keep.limit(keep.latest(1) | keep.best(1, 'loss', mode='min') | keep.hourly(24) | keep.monthly(12) | "
        "keep.yearly(10) | keep.within(hours=36) | keep.after('attempt'), bytes=716800)"
    )
    kept = {f"a{row['checkpoint']['attempt']}/{row['checkpoint']['step']}" for row in found["plan"] if row["keep"]}
    assert kept == {"a2/7", "a2/5", "a1/8"}, "198 KiB each: latest, the last one verified and the best stay"
    reasons = [row["reason"] for row in found["plan"] if not row["keep"]]
    assert set(reasons) == {"beyond the budget of 700 KiB"}


def test_keep_after_rollback_keeps_what_was_saved_first_after_it(cli, place):
    status, _, err = cli("rollback", place, "a1/8", "--run", "gpt")
    assert status == 0, err
    state = {"w": np.zeros(4)}
    with tenuto.Checkpointer(place, state, run="gpt", save=tenuto.every(steps=1), keep=tenuto.keep.all()) as ckpt:
        ckpt.restore(strict=False)
        for _ in ckpt.steps(11):
            pass
    status, out, err = cli("keep", place, "--run", "gpt", "--after", "rollback", "--dry-run")
    assert status == 0, err
    (line,) = (line for line in out.splitlines() if "after a rollback" in line and "kept" in line)
    assert line.split()[:2] == ["a0004/9", "kept"]


def test_a_budget_that_cannot_be_met_is_a_warning_that_names_what_may_not_go(cli, made):
    status, out, err = cli("keep", made, "--run", "gpt", "--budget", "1KiB", "--dry-run")
    assert (status, out.splitlines()[0]) == (0, "run gpt: keep.limit(keep.all(), bytes=1024)")
    assert err == (
        "warning: the budget of 1.00 KiB is not met, since what may not go takes 397 KiB: "
        "a0002/7 (what latest means), a0002/5 (the last one verified)\n"
    )


def test_keep_refuses_what_is_no_policy(cli, made):
    for options, words in (
        ((), "nothing says what to keep"),
        (("--within", "soon"), "--within='soon' is not a time"),
        (("--budget", "much"), "--budget='much' is not a number of bytes"),
        (("--after", "lunch"), "'lunch' is not an event"),
        (("--monthly", "0"), "keep.monthly(0) would never be reached"),
    ):
        status, out, err = cli("keep", made, "--run", "gpt", *options)
        assert (status, out) == (2, "") and words in err, options
