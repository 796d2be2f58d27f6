import json

import tenuto


def test_a_tag_is_put_shown_moved_and_taken_off(cli, place):
    assert cli("tag", place, "baseline", "--run", "gpt", "--step", "4") == (0, "gpt/a0001/4 is tagged baseline\n", "")
    row = cli("ls", place, "--run", "gpt")[1].splitlines()[6]
    assert (row.split()[:2], row.split()[-2:]) == (["a0001", "4"], ["tagged", "baseline"])
    found = json.loads(cli("ls", place, "--run", "gpt", "--json")[1])
    assert [row["tags"] for row in found["runs"][0]["checkpoints"]] == [[], [], [], [], ["baseline"], []]
    assert cli("show", place, "--run", "gpt", "--step", "baseline")[1].splitlines()[0] == "gpt/a0001/4  tagged baseline"
    status, _, err = cli("rm", place, "baseline", "--run", "gpt", "--yes")
    assert (status, "tag 'baseline' names it" in err) == (16, True)
    moved = cli("tag", place, "baseline", "--run", "gpt")
    assert moved == (0, "gpt/a0002/7 is tagged baseline (moved from gpt/a0001/4)\n", "")
    assert cli("tag", place, "baseline", "--delete")[1] == "gpt/a0002/7 is no longer tagged baseline\n"
    assert "tagged" not in cli("ls", place)[1]


def test_a_tag_is_the_repositorys_and_needs_no_run(cli, place, tmp_path):
    cli("tag", place, "baseline", "--run", "gpt", "--step", "4")
    assert cli("show", place, "--step", "4")[0] == 2, "which run?"
    assert cli("show", place, "--step", "baseline")[1].splitlines()[0] == "gpt/a0001/4  tagged baseline"
    assert cli("verify", place, "--step", "baseline")[1].startswith("1 checkpoint: whole")
    assert "gpt/a0001/4" in cli("restore", place, tmp_path / "state.safetensors", "--step", "baseline")[1]
    assert "tag 'baseline' names it" in cli("rm", place, "baseline", "--yes")[2]
    assert cli("tag", place, "paper", "--step", "baseline")[1] == "gpt/a0001/4 is tagged paper\n"
    status, _, err = cli("show", place, "--step", "baselin")
    assert status == 11
    assert "neither a step nor a tag; tags that there are: baseline, paper" in " ".join(err.split())


def test_a_tag_of_another_run_is_found_as_load_finds_it(cli, place):
    cli("tag", place, "baseline", "--run", "gpt", "--step", "4")
    loaded = tenuto.load(place, run="small", step="baseline").checkpoint
    assert str(loaded.id) == "gpt/a0001/4"
    assert (
        cli("show", place, "--run", "small", "--step", "baseline")[1].splitlines()[0] == f"{loaded.id}  tagged baseline"
    )


def test_what_cannot_be_a_tag_is_refused(cli, place):
    for name in ("latest", "500", "Base Line"):
        assert cli("tag", place, name, "--run", "gpt")[0] == 2
    assert cli("tag", place, "baseline", "--delete")[0] == 11
    assert cli("tag", place, "baseline", "--run", "gpt", "--delete")[0] == 2
    status, _, err = cli("show", place, "--run", "gpt", "--step", "baselin")
    assert (status, "neither a step nor a tag" in err) == (11, True)


def test_a_damaged_tag_hides_no_checkpoint(cli, place):
    cli("tag", place, "baseline", "--run", "gpt", "--step", "4")
    (place / "refs/tag/baseline/1.json").write_bytes(b"?")
    status, out, _ = cli("ls", place, "--run", "gpt")
    assert (status, len(out.splitlines())) == (0, 8)


def test_a_damaged_tag_is_put_anew_or_taken_off(cli, place):
    for name in ("baseline", "best"):
        cli("tag", place, name, "--run", "gpt", "--step", "4")
        (place / f"refs/tag/{name}/1.json").write_bytes(b"?")
    assert cli("tag", place, "best", "--run", "gpt", "--step", "7") == (0, "gpt/a0002/7 is tagged best\n", "")
    taken_off = "what it was on, which cannot be read, is no longer tagged baseline\n"
    assert cli("tag", place, "baseline", "--delete") == (0, taken_off, "")
    assert cli("tag", place, "baseline", "--delete")[0] == 11
    assert cli("rm", place, "gpt/a0001/4", "--run", "gpt", "--yes")[0] == 0
