import json


def removed(cli, place):
    assert cli("rm", place, "gpt/a0001/2", "gpt/a0001/6", "--yes")[0] == 0


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
    assert (status, found["schema"], found["done"]) == (0, "holdfast.gc/1", None)
    assert [garbage["checkpoint"]["step"] for garbage in found["garbage"]] == [2, 6]
    assert sorted(place.rglob("*")) == before


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


def test_undelete_of_what_is_not_removed(cli, place):
    removed(cli, place)
    status, _, err = cli("undelete", place, "8", "--run", "gpt")
    assert (status, err) == (11, "error: 8 of run 'gpt' is not removed\n")
    status, _, err = cli("undelete", place, "99", "--run", "gpt")
    assert err.splitlines()[0] == (
        "error: no removed checkpoint 99 in run 'gpt'; in the trash: gpt/a0001/6, gpt/a0001/2"
    )


def test_undelete_json(cli, place):
    removed(cli, place)
    found = json.loads(cli("undelete", place, "gpt/a0001/2", "--json")[1])
    assert found["schema"] == "holdfast.undelete/1"
    assert found["undeleted"] == [{"run": "gpt", "attempt": 1, "step": 2}]
