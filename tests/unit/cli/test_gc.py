import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import tenuto
from tenuto import every, keep
from tenuto.cli.console import options
from tenuto.errors import UsageError


def removed(cli, place):
    assert cli("rm", place, "gpt/a0001/2", "gpt/a0001/6", "--yes")[0] == 0


def marked_hours_ago(cli, place, hours):
    """Removed so long ago."""
    removed(cli, place)
    for mark in place.glob("tombstones/gc/*/*/*/*.json"):
        then = mark.stat().st_mtime - hours * 3600
        os.utime(mark, (then, then))


def test_gc_says_when_it_frees_what_is_in_the_trash_and_frees_it_then(cli, place):
    removed(cli, place)
    assert cli("gc", place) == (
        0,
        """\
  gpt/a0001/2  wait 25.0 h: in the trash, 198 KiB
  gpt/a0001/6  wait 25.0 h: in the trash, 198 KiB
2 saves waiting (397 KiB)
""",
        "hint: the first gc after 25.0 h frees 397 KiB; tenuto gc /ckpts --now frees it now\n",
    )
    status, out, err = cli("gc", place, "--grace", "0")
    assert (status, err.splitlines()[0]) == (2, "error: nothing was done: there is no terminal to ask on")
    status, out, _ = cli("gc", place, "--grace", "0", "--yes")
    assert re.fullmatch(
        r"2 saves deleted, 397 KiB freed \(\S+ \S+ free there now, \S+ \S+ before\)", out.splitlines()[-1]
    )
    assert not (place / "runs/gpt/a0001/step-00000002/rank-00000.safetensors").exists()
    assert cli("verify", place)[0] == 0
    assert cli("gc", place)[1].splitlines()[-1] == "nothing to free"


def test_gc_now_frees_at_once_and_says_how_much(cli, place):
    removed(cli, place)
    status, _, err = cli("gc", place, "--now")
    assert (status, "--yes does it without asking" in err) == (2, True)
    found = json.loads(cli("gc", place, "--now", "--yes", "--json")[1])
    assert (found["now"], found["done"]["bytes"], len(found["done"]["deleted"])) == (True, found["bytes"], 2)
    assert found["bytes"] > 390 * 1024
    assert found["done"]["free_before"] > 0 < found["done"]["free_after"]
    assert not (place / "runs/gpt/a0001/step-00000002/rank-00000.safetensors").exists()
    assert cli("verify", place)[0] == 0
    assert cli("gc", place, "--now", "--yes") == (
        0,
        "nothing to free\n",
        "hint: tenuto keep /ckpts --latest 1 --now frees all but the newest checkpoint of a run, and asks first\n",
    )


def test_gc_now_leaves_the_last_that_can_be_restored_and_says_how_to_have_it_back(cli, place):
    assert cli("rm", place, "small/a0001/1", "--force", "--yes")[0] == 0
    status, out, _ = cli("gc", place, "--now", "--yes")
    assert (status, out) == (
        0,
        "  1 save left alone: the last of run small that can be restored: "
        "tenuto undelete /ckpts small/a0001/1 brings it back, --force frees it\nnothing to free\n",
    )
    assert cli("undelete", place, "small/a0001/1", "--dry-run")[0] == 0
    assert "1 save deleted" in cli("gc", place, "--now", "--force", "--yes")[1]


def test_gc_now_takes_no_grace_and_force_needs_now(cli, place):
    assert cli("gc", place, "--now", "--grace", "5")[0] == 2
    assert cli("gc", place, "--force")[0] == 2


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
    with pytest.raises(UsageError, match="not a duration that can pass"):
        options.grace_seconds(hours)


def test_gc_of_a_tidy_repository(cli, place):
    assert cli("gc", place) == (0, "nothing to free\n", "")


def test_undelete(cli, place):
    removed(cli, place)
    assert cli("undelete", place, "2", "--run", "gpt", "--dry-run")[1] == (
        "gpt/a0001/2 can come back for 24.0 h, 198 KiB to be checked\n"
    )
    assert cli("undelete", place, "2", "gpt/a0001/6", "--run", "gpt")[:2] == (
        0,
        "gpt/a0001/2 is back, 198 KiB verified\ngpt/a0001/6 is back, 198 KiB verified\n",
    )
    assert "removed" not in cli("ls", place)[1]
    assert cli("verify", place)[0] == 0


def test_undelete_keeps_away_from_gc_by_the_grace_that_gc_is_run_with(cli, place):
    marked_hours_ago(cli, place, 48)
    assert "wait 121.0 h" in cli("gc", place, "--grace", "168", "--dry-run")[1]
    status, _, err = cli("undelete", place, "2", "--run", "gpt")
    hint = "hint: where gc is run with a longer grace: tenuto undelete /ckpts gpt/a0001/2 --grace HOURS"
    assert (status, err.splitlines()[-1]) == (10, hint)
    status, out, _ = cli("undelete", place, "2", "--run", "gpt", "--grace", "168", "--dry-run")
    assert (status, out) == (0, "gpt/a0001/2 can come back for 120.0 h, 198 KiB to be checked\n")
    assert cli("undelete", place, "2", "--run", "gpt", "--grace", "168")[1] == "gpt/a0001/2 is back, 198 KiB verified\n"


def test_undelete_of_what_is_not_removed(cli, place):
    removed(cli, place)
    status, _, err = cli("undelete", place, "8", "--run", "gpt")
    assert (status, err) == (11, "error: 8 of run 'gpt' is not removed\nhint: tenuto ls /ckpts\n")
    status, _, err = cli("undelete", place, "99", "--run", "gpt")
    assert err.splitlines()[0] == (
        "error: no removed checkpoint 99 in run 'gpt'; in the trash: gpt/a0001/6, gpt/a0001/2"
    )


def test_undelete_of_what_gc_has_freed_says_so(cli, place):
    removed(cli, place)
    assert cli("gc", place, "--now", "--yes")[0] == 0
    assert "aborted" not in cli("ls", place)[1], "it was removed, and nothing is left to look at"
    status, _, err = cli("undelete", place, "2", "--run", "gpt")
    assert (status, err.splitlines()[0]) == (
        11,
        "error: gpt/a0001/2 cannot be brought back: its space has been freed",
    )


def test_undelete_json(cli, place):
    removed(cli, place)
    found = json.loads(cli("undelete", place, "gpt/a0001/2", "--json")[1])
    assert found["schema"] == "tenuto.undelete/1"
    assert found["undeleted"] == [{"run": "gpt", "attempt": 1, "step": 2}]


KILLED_IN_A_PUT = """
import os, sys
import numpy as np
import tenuto
from tenuto import every, keep
from tenuto.store.local.store import LocalStore

give = LocalStore._give_name
seen = []


def die(self, descriptor, temporary, final, name):
    if name.endswith(sys.argv[2]):
        seen.append(name)
        if len(seen) == int(sys.argv[3]):
            os.kill(os.getpid(), 9)
    return give(self, descriptor, temporary, final, name)


LocalStore._give_name = die
with tenuto.Checkpointer(sys.argv[1], {"w": np.arange(4096)}, save=every(steps=1), keep=keep.all()) as ckpt:
    for _ in ckpt.steps(4):
        pass
"""


@pytest.mark.parametrize(
    ("name", "time"), [("begin.json", 2), ("manifest.json", 2), ("rank-00000.safetensors", 2), ("lease/1.json", 1)]
)
def test_gc_now_frees_what_a_put_of_a_dead_process_has_left_at_once(cli, tmp_path, name, time):
    place = tmp_path / "ckpts"
    words = [sys.executable, "-c", KILLED_IN_A_PUT, place, name, str(time)]
    assert subprocess.run(words, check=False, timeout=120).returncode == -9
    assert [path.name for path in place.rglob("*.tmp-*")] != []
    assert cli("gc", place, "--now", "--force", "--yes")[0] == 0
    assert [path.name for path in place.rglob("*.tmp-*")] == []


def test_gc_now_leaves_what_a_living_process_puts(cli, tmp_path):
    place = tmp_path / "ckpts"
    with tenuto.Checkpointer(place, {"w": np.arange(4096)}, save=every(steps=1), keep=keep.all()) as ckpt:
        for _ in ckpt.steps(2):
            pass
        attempt = place / "runs/main/a0001"
        mine = [attempt / f"lease/9.json.tmp-{'0' * 32}", attempt / f"step-00000003/begin.json.tmp-{'0' * 32}"]
        mine[1].parent.mkdir()
        for path in mine:
            path.write_bytes(b"{")
        assert cli("gc", place, "--now", "--yes")[0] == 0
        assert all(path.exists() for path in mine)
    assert cli("gc", place, "--now", "--yes")[0] == 0
    assert not any(path.exists() for path in mine)
