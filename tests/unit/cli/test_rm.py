import contextlib
import io
import json
from datetime import datetime, timedelta

import pytest

from tenuto.cli import main


def test_rm_prints_its_plan_and_asks_for_yes_without_a_terminal(cli, place):
    assert cli("rm", place, "gpt/a0001/2") == (
        2,
        "  gpt/a0001/2  goes into the trash, 198 KiB\n",
        "error: nothing was done: there is no terminal to ask on\nhint: --yes does it without asking\n",
    )
    assert (place / "runs/gpt/a0001/step-00000002/manifest.json").exists()


def test_rm_removes_and_ls_shows_it_as_removed(cli, place):
    status, out, err = cli("rm", place, "2", "a0001/8", "--run", "gpt", "--yes")
    assert (status, err) == (
        0,
        "`tenuto undelete` can bring it back for 24 h; `tenuto gc` frees its space after 25 h\n"
        "hint: to free it now: tenuto gc /ckpts --now\n",
    )
    assert (
        out
        == """\
  gpt/a0001/2  goes into the trash, 198 KiB
  gpt/a0001/8  goes into the trash, 198 KiB
2 checkpoints removed, 397 KiB in the trash
"""
    )
    assert not [row for row in cli("ls", place, "--run", "gpt")[1].splitlines() if "removed" in row]
    listed = cli("ls", place, "--run", "gpt", "--trash")[1].splitlines()
    assert [row.split()[:2] for row in listed if "removed" in row] == [["a0001", "8"], ["a0001", "2"]]


def test_ls_trash_says_until_when_it_is_there(cli, place):
    assert cli("ls", place, "--trash") == (0, "", "/ckpts: nothing in the trash\n")
    assert cli("rm", place, "gpt/a0001/2", "--yes")[0] == 0
    (mark,) = place.glob("tombstones/gc/*/*/*/*.json")
    created = datetime.fromisoformat(json.loads(mark.read_text())["created"])
    status, out, err = cli("ls", place, "--trash")
    head, _, row = out.splitlines()
    assert (status, err, head) == (0, "", "run gpt: 1 in the trash, 198 KiB")
    assert (
        row.split()[:2] == ["a0001", "2"] and f"removed, kept until {created + timedelta(hours=24):%m-%d %H:%M}" in row
    )
    assert cli("ls", place, "--run", "gpt")[1].startswith("run gpt: 5 checkpoints, 990 KiB; 1 in the trash\n")
    (run,) = json.loads(raw(cli, "ls", place, "--trash", "--json"))["runs"]
    (found,) = run["checkpoints"]
    assert datetime.fromisoformat(found["goes"]) == created + timedelta(hours=25)


def raw(cli, *words):
    """What a command prints, with its times."""
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit):
        main([str(word) for word in words])
    return out.getvalue()


def test_rm_refuses_what_latest_means_with_the_reason_and_removes_nothing(cli, place):
    status, out, err = cli("rm", place, "7", "2", "--run", "gpt", "--yes")
    assert status == 16
    assert "  gpt/a0002/7  stays: it is what `latest` means in run 'gpt'" in out.splitlines()
    assert err.startswith("error: gpt/a0002/7 is not removed: ")
    assert (place / "runs/gpt/a0001/step-00000002/manifest.json").exists()
    assert cli("rm", place, "7", "--run", "gpt", "--yes", "--force")[0] == 0


def test_rm_dry_run_and_json(cli, place):
    status, out, _ = cli("rm", place, "2", "7", "--run", "gpt", "--dry-run", "--json")
    found = json.loads(out)
    assert (status, found["schema"], found["dry_run"], found["removed"]) == (0, "tenuto.rm/1", True, [])
    assert [(plan["checkpoint"]["step"], plan["remove"]) for plan in found["plan"]] == [(2, True), (7, False)]
    assert (place / "runs/gpt/a0001/step-00000002/manifest.json").exists()


def test_rm_of_what_is_not_there(cli, place):
    assert cli("rm", place, "99", "--run", "gpt", "--yes")[0] == 11
