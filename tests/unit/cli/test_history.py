"""`log`, `compare`, `rollback`, `fork`, `bisect`, `note`, `pin`: what only a command line has, and odd repositories."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import tenuto
from support.saves_of_ranks import save_jointly
from tenuto.model.ids import CheckpointId
from tenuto.repo.ownership.claim import claim
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store


def test_a_rollback_is_undone_by_what_its_hint_says(cli, place):
    status, out, err = cli("rollback", place, "a0001/6", "--run", "gpt", "--reason", "diverged")
    assert (status, out.splitlines()[-1]) == (0, "latest of run gpt is gpt/a0001/6")
    assert err == "hint: to undo it: tenuto rollback /ckpts gpt/a0002/7 --run gpt\n"
    assert "rolled back to gpt/a0001/6" in " ".join(cli("log", place, "--run", "gpt")[1].split())
    assert cli("rollback", place, "gpt/a0002/7")[0] == 0
    assert str(tenuto.Repository(place).latest("gpt")) == "gpt/a0002/7"
    turns = json.loads(cli("log", place, "--run", "gpt", "--json")[1])["turns"]
    assert [turn["reason"] for turn in turns] == [None, "diverged"]


def test_a_dry_run_changes_nothing(cli, place):
    def names():
        return sorted(str(path) for path in place.rglob("*"))

    before = names()
    assert cli("rollback", place, "4", "--run", "gpt", "--dry-run")[0] == 0
    assert cli("fork", place, "4", "warm", "--run", "gpt", "--dry-run")[0] == 0
    assert names() == before


def test_a_run_in_use_is_refused_with_who_uses_it(cli, place):
    held = claim(Repo.open(open_store(place)), "gpt", CheckpointId("gpt", 2, 7))
    status, _, err = cli("rollback", place, "4", "--run", "gpt")
    held.release()
    assert (status, "is in use: attempt 3 belongs to" in " ".join(err.split())) == (13, True)
    assert err.splitlines()[-1] == "hint: stop that process, then: tenuto rollback /ckpts gpt/a0001/4 --run gpt"


def test_a_fork_is_logged_under_its_name_and_trained_there(cli, place):
    assert cli("fork", place, "gpt/a0001/4", "warm")[0] == 0
    assert cli("fork", place, "gpt/a0001/4", "WARM")[0] == 2
    found = json.loads(cli("log", place, "--run", "warm", "--json")[1])
    assert found["latest"] == {"run": "gpt", "attempt": 1, "step": 4}
    assert [one["checkpoint"]["step"] for one in found["checkpoints"]] == [4, 2]
    assert cli("log", place, "--run", "wrm")[2].splitlines()[-1] == "hint: did you mean 'warm'?"


def test_a_step_of_two_lines_is_the_one_on_the_line_and_says_so(cli, place):
    cli("rollback", place, "a0001/4", "--run", "gpt")
    options = {"run": "gpt", "save": tenuto.every(steps=1), "keep": tenuto.keep.all(), "sinks": []}
    with tenuto.Checkpointer(place, {"x": np.zeros(2)}, **options) as ckpt:
        ckpt.restore(strict=False)
        for _ in ckpt.steps(6):
            pass
    status, out, err = cli("show", place, "--run", "gpt", "--step", "6")
    assert (status, out.split()[0]) == (0, "gpt/a0004/6")
    assert err.startswith("note: step 6 is gpt/a0004/6; the run has saved it more than once: a0001/6\n")
    assert "note" not in cli("show", place, "--run", "gpt", "--step", "a0001/6")[2]


def test_bisect_runs_a_command_without_a_place_on_its_line(cli, place, monkeypatch):
    monkeypatch.setenv("TENUTO_WHERE", str(place))
    code = "import os, sys; sys.exit(os.environ['TENUTO_STEP'] > 'gpt/a0001/2')"
    status, out, err = cli("bisect", "--run", "gpt", "--", sys.executable, "-c", code)
    assert (status, "gpt/a0001/4 is the first" in out, "gpt/a0001/2: does not hold" in err) == (0, True, True)
    assert cli("bisect", place, "--run", "gpt", "--", "./no-such-program")[0] == 2
    assert cli("bisect", place, "--run", "gpt", "--leaf", "x", "--where", "loss > 3")[0] == 2


def test_bisect_refuses_an_end_of_another_run_by_name(cli, place):
    for how in (("--where", "loss > 3"), ("--nan",), ("--linear", "--where", "loss > 3")):
        status, _, err = cli("bisect", place, "--run", "gpt", "--bad", "small/a0001/1", *how)
        assert (status, err) == (
            2,
            "error: small/a0001/1 is not on the line of training of run 'gpt'\n"
            "hint: tenuto log /ckpts --run gpt shows the line\n",
        )


def test_only_nan_opens_the_keys_of_a_repository(cli, place, monkeypatch):
    asked = []
    monkeypatch.setattr("tenuto.history.bisect.unlock", asked.append)
    assert cli("bisect", place, "--run", "gpt", "--where", "loss < 0.3")[0] == 0
    assert cli("bisect", place, "--run", "gpt", "--", "false")[0] == 0
    assert asked == []
    assert (cli("bisect", place, "--run", "gpt", "--nan")[0], len(asked)) == (11, 1)


def test_checkpoints_of_several_ranks(cli, tmp_path):
    save_jointly(Repo.create_or_open(open_store(tmp_path / "ckpts")), 3, session="5" * 32)
    place = tmp_path / "ckpts"
    (run,) = tenuto.Repository(place).runs()
    newest = tenuto.Repository(place).latest(run)
    assert str(newest) in cli("compare", place)[1]
    assert cli("bisect", place, "--nan")[0] == 11
    assert cli("rollback", place, str(newest))[0] == 0
    assert cli("fork", place, str(newest), "warm")[0] == 0
    assert tenuto.Repository(place).latest("warm") == newest


def test_where_nothing_was_saved_every_command_says_so(cli, tmp_path):
    place = tmp_path / "ckpts"
    Repo.create_or_open(open_store(place))
    for words in (["log"], ["compare"], ["bisect", "--where", "loss > 1"]):
        assert cli(words[0], place, *words[1:])[0] == 11
    for words in (["rollback", "5"], ["fork", "5", "new"], ["note", "5", "text"], ["pin", "5"]):
        assert cli(words[0], place, *words[1:])[0] == 11


def test_ls_show_and_log_say_why_something_is_kept(cli, place):
    cli("pin", place, "4", "--run", "gpt", "--hold", "--reason", "audit until May")
    for words in (["ls"], ["log"], ["show", "--step", "4"]):
        assert "on hold: audit until May" in " ".join(cli(words[0], place, "--run", "gpt", *words[1:])[1].split())
    assert json.loads(cli("show", place, "--run", "gpt", "--step", "4", "--json")[1])["pins"] == [
        {"kind": "hold", "name": "gpt=a0001=4", "reason": "audit until May"}
    ]
    assert cli("keep", place, "--run", "gpt", "--latest", "1", "--yes")[0] == 0
    assert [str(id) for id in tenuto.Repository(place).checkpoints("gpt")] == [
        "gpt/a0002/7",
        "gpt/a0002/5",
        "gpt/a0001/4",
    ]


@pytest.mark.parametrize("word", ["loss", "=1", "loss=much", "loss="])
def test_a_metric_is_a_name_and_a_number(cli, place, word):
    status, _, err = cli("note", place, "4", "--run", "gpt", "--metric", word)
    assert (status, "is not NAME=VALUE" in err) == (2, True)


def test_a_course_is_ascii_where_stdout_has_no_blocks(place):
    words = [sys.executable, "-m", "tenuto", "log", str(place), "--run", "gpt", "--metric", "loss"]
    done = subprocess.run(words, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, check=True)
    assert b"loss  @-._  0.5 to 0.1429" in done.stdout
