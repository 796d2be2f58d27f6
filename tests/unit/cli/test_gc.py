import json
import os

import pytest

from tenuto.cli.console import options
from tenuto.errors import UsageError


def removed(cli, place):
    assert cli("rm", place, "gpt/a0001/2", "gpt/a0001/6", "--yes")[0] == 0


def marked_hours_ago(cli, place, hours):
    """Removed, and visited by gc so long ago."""
    removed(cli, place)
    assert cli("gc", place)[0] == 0
    for mark in place.glob("tombstones/gc/*/*/*/*.json"):
        then = mark.stat().st_mtime - hours * 3600
        os.utime(mark, (then, then))


def test_gc_marks_first_and_deletes_after_the_grace(cli, place):
    removed(cli, place)
    assert cli("gc", place) == (
        0,
        """\
  gpt/a0001/2  mark, goes in 24 h: removed by hand, 198 KiB
  gpt/a0001/6  mark, goes in 24 h: removed by hand, 198 KiB
2 saves to mark
2 saves marked
""",
        "hint: what is marked is deleted by the first gc after 24 h\n",
    )
    assert cli("gc", place)[1].splitlines()[0].startswith("  gpt/a0001/2  wait 24.0 h: ")
    status, out, err = cli("gc", place, "--grace", "0")
    assert (status, err.splitlines()[0]) == (2, "error: nothing was done: there is no terminal to ask on")
    status, out, _ = cli("gc", place, "--grace", "0", "--yes")
    assert out.splitlines()[-1] == "2 saves deleted, 397 KiB freed"
    assert not (place / "runs/gpt/a0001/step-00000002/rank-00000.safetensors").exists()
    assert cli("verify", place)[0] == 0
    assert cli("gc", place)[1].splitlines()[-1] == "nothing to free"


def test_gc_dry_run_does_nothing(cli, place):
    removed(cli, place)
    before = sorted(place.rglob("*"))
    status, out, _ = cli("gc", place, "--dry-run", "--json", "--grace", "0")
    found = json.loads(out)
    assert (status, found["schema"], found["done"]) == (0, "tenuto.gc/1", None)
    assert [garbage["checkpoint"]["step"] for garbage in found["garbage"]] == [2, 6]
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("grace", ["nan", "inf", "-1"])
@pytest.mark.parametrize("words", [("gc", "--yes"), ("undelete", "2", "--run", "gpt")])
def test_a_grace_that_is_no_duration_is_refused(cli, place, grace, words):
    marked_hours_ago(cli, place, 1)
    before = sorted(place.rglob("*"))
    assert cli(words[0], place, *words[1:], "--grace", grace)[:2] == (2, "")
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("hours", [float("nan"), float("inf"), 1e308])
def test_a_grace_that_is_not_finite_is_refused_by_whatever_reads_the_command_line(hours):
    with pytest.raises(UsageError, match="no duration that can pass"):
        options.grace_seconds(hours)


def test_gc_of_a_tidy_repository(cli, place):
    assert cli("gc", place) == (0, "nothing to free\n", "")


def test_undelete(cli, place):
    removed(cli, place)
    assert cli("undelete", place, "2", "--run", "gpt", "--dry-run")[1] == (
        "gpt/a0001/2 can come back, 198 KiB to be checked\n"
    )
    assert cli("undelete", place, "2", "gpt/a0001/6", "--run", "gpt")[:2] == (
        0,
        "gpt/a0001/2 is back, 198 KiB verified\ngpt/a0001/6 is back, 198 KiB verified\n",
    )
    assert "removed" not in cli("ls", place)[1]
    assert cli("verify", place)[0] == 0


def test_undelete_keeps_away_from_gc_by_the_grace_that_gc_is_run_with(cli, place):
    marked_hours_ago(cli, place, 48)
    assert "wait 120.0 h" in cli("gc", place, "--grace", "168", "--dry-run")[1]
    status, _, err = cli("undelete", place, "2", "--run", "gpt")
    hint = "hint: where gc is run with a longer grace: tenuto undelete /ckpts gpt/a0001/2 --grace HOURS"
    assert (status, err.splitlines()[-1]) == (10, hint)
    status, out, _ = cli("undelete", place, "2", "--run", "gpt", "--grace", "168", "--dry-run")
    assert (status, out) == (0, "gpt/a0001/2 can come back, 198 KiB to be checked; gc may take it in 120.0 h\n")
    assert cli("undelete", place, "2", "--run", "gpt", "--grace", "168")[1] == "gpt/a0001/2 is back, 198 KiB verified\n"


def test_undelete_of_what_is_not_removed(cli, place):
    removed(cli, place)
    status, _, err = cli("undelete", place, "8", "--run", "gpt")
    assert (status, err) == (11, "error: 8 of run 'gpt' is not removed\nhint: tenuto ls /ckpts\n")
    status, _, err = cli("undelete", place, "99", "--run", "gpt")
    assert err.splitlines()[0] == (
        "error: no removed checkpoint 99 in run 'gpt'; in the trash: gpt/a0001/6, gpt/a0001/2"
    )


def test_undelete_json(cli, place):
    removed(cli, place)
    found = json.loads(cli("undelete", place, "gpt/a0001/2", "--json")[1])
    assert found["schema"] == "tenuto.undelete/1"
    assert found["undeleted"] == [{"run": "gpt", "attempt": 1, "step": 2}]
