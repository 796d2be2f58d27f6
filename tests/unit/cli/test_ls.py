import json
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest

import tenuto
from tenuto import every, keep
from tenuto.cli.console.output import Columns
from tenuto.cli.views.run_listing import listing
from tenuto.maintenance.remove import execute, plan_remove
from tenuto.model.ids import CheckpointId
from tenuto.repo import lineage
from tenuto.repo.notes import add_note
from tenuto.repo.repository import Repo
from tenuto.store.local.store import LocalStore
from tenuto.store.registry import open_store
from tenuto.testing.object_store import Bucket, SimulatedObjectStore

from .conftest import save


def test_ls_whole(cli, made):
    assert cli("ls", made) == (
        0,
        """\
run gpt: 6 checkpoints, 1.17 MiB
  ATTEMPT  STEP  AGE     SIZE  late    loss  val_loss  STATE
  a0002       7  5 h  198 KiB  0.25  0.1429       0.5  latest
  a0002       5  5 h  198 KiB           0.2       0.5  verified
  a0001       8  5 h  198 KiB         0.125       0.5  left behind
  a0001       6  5 h  198 KiB        0.1667       nan  left behind
  a0001       4  5 h  198 KiB          0.25       0.5
  a0001       2  5 h  198 KiB           0.5       0.5

run small: 1 checkpoint, 4.04 KiB
  ATTEMPT  STEP  AGE      SIZE  CREATED           loss  val_loss  STATE
  a0001       1  5 h  4.04 KiB  2030-01-02 03:04     1       0.5  latest

2 runs, 7 checkpoints, 1.17 MiB
""",
        "",
    )


def test_ls_counts_what_there_is_and_lists_the_trash_on_request_alone(cli, place):
    with tenuto.Checkpointer(place, {"w": np.zeros(3)}, run="many", save=every(steps=1), keep=keep.all()) as ckpt:
        for _ in ckpt.steps(30):
            pass
    cli("keep", place, "--run", "many", "--latest", "10", "--yes")
    cli("undelete", place, "5", "--run", "many")
    cli("rm", place, "29", "--run", "many", "--yes")
    _, out, err = cli("ls", place, "--run", "many")
    heading, _, *rows = out.splitlines()
    assert heading.startswith("run many: 10 checkpoints, ") and heading.endswith("; 20 in the trash")
    assert [int(row.split()[1]) for row in rows] == [30, *range(28, 20, -1), 5]
    assert err.strip() == "20 in the trash: tenuto ls /ckpts --run many --trash"
    assert cli("ls", place, "--run", "many", "--all")[1] == out
    page = cli("ls", place, "--run", "many", "--limit", "4")[1].splitlines()
    assert page[0].startswith("run many: 4 of 10 saves shown, ") and page[0].endswith("; 20 in the trash")
    assert len(page) == 6
    trash = cli("ls", place, "--run", "many", "--trash")[1].splitlines()
    assert trash[0].startswith("run many: 20 in the trash, ") and sum("removed" in row for row in trash) == 20
    assert cli("ls", place)[1].splitlines()[-1].endswith("; 20 in the trash")


def test_counts_of_one_listing_are_those_of_directories():
    store = SimulatedObjectStore(Bucket())
    for step in range(6):
        tenuto.save({"w": np.zeros(3)}, store, step=step)
    repo = Repo.open(store)
    execute(repo, plan_remove(repo, [CheckpointId("main", 1, step) for step in (1, 2, 4)]))
    (found,) = listing(repo, None, 2, trash=False)
    assert ([row.id.step for row in found.rows], found.more, found.trash) == ([5, 3], 1, 3)


def test_ls_shows_what_training_judges_by_and_not_what_adapters_write_for_themselves(cli, tmp_path, monkeypatch):
    policy = keep.latest(3) | keep.best(1, "eval_loss") | keep.best(1, "best_model_step", "max")
    with tenuto.Checkpointer(tmp_path / "ckpts", {"w": np.zeros(3)}, save=every(steps=1), keep=policy) as ckpt:
        for step in ckpt.steps(2):
            ckpt.log(best_model_step=float(step), aaa=1.0, eval_loss=0.5)
    monkeypatch.setenv("COLUMNS", "80")
    title = cli("ls", tmp_path / "ckpts")[1].splitlines()[1]
    assert "eval_loss" in title
    monkeypatch.setenv("COLUMNS", "300")
    for words in ([], ["--where", "step > 0"]):
        out = cli("ls", tmp_path / "ckpts", *words)[1]
        assert "best_model_step" not in out and "aaa" in out
    assert "best_model_step" in cli("show", tmp_path / "ckpts")[1]


def test_ls_in_a_wide_terminal_shows_all_columns(cli, made, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    _, out, _ = cli("ls", made, "--run", "GPT")
    first, row = out.splitlines()[1:3]
    assert first == "  ATTEMPT  STEP  AGE     SIZE  CREATED           late    loss  val_loss  STATE"
    assert row == "  a0002       7  5 h  198 KiB  2030-01-02 03:04  0.25  0.1429       0.5  latest"


def test_ls_in_a_narrow_terminal_never_cuts_a_word(cli, made, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    _, out, _ = cli("ls", made, "--run", "gpt")
    assert out.splitlines()[1:3] == ["  ATTEMPT  STEP  STATE", "  a0002       7  latest"]


def test_ls_shows_what_is_broken_as_broken(cli, place):
    run = place / "runs/gpt"
    (run / "a0001/step-00000006/manifest.json").write_bytes(b'{"format":1}')
    (run / "a0001/step-00000002/manifest.json").unlink()
    shutil.copytree(run / "a0002/step-00000005", run / "a0002/step-00000015")
    status, out, _ = cli("ls", place, "--run", "gpt")
    assert status == 0
    assert (
        out
        == """\
run gpt: 4 checkpoints, 792 KiB
  ATTEMPT  STEP  AGE     SIZE  late    loss  val_loss  STATE
  a0002      15                                        a copy
  a0002       7  5 h  198 KiB  0.25  0.1429       0.5  latest
  a0002       5  5 h  198 KiB           0.2       0.5  verified
  a0001       8  5 h  198 KiB         0.125       0.5  left behind
  a0001       6                                        DAMAGED
  a0001       4  5 h  198 KiB          0.25       0.5
  a0001       2                                        DAMAGED
"""
    )


def test_ls_marks_a_damaged_latest_as_latest(cli, place):
    (place / "runs/gpt/a0002/step-00000007/manifest.json").write_bytes(b"?")
    _, out, _ = cli("ls", place, "--run", "gpt")
    assert out.splitlines()[2].split() == ["a0002", "7", "latest,", "DAMAGED"]


def test_ls_never_calls_a_copy_the_latest_even_if_it_was_damaged_before(cli, place):
    run = place / "runs/gpt"
    (run / "a0002/step-00000005/manifest.json").write_bytes(b'{"format":1}')
    shutil.copytree(run / "a0002/step-00000005", run / "a0002/step-00000015")
    _, out, _ = cli("ls", place, "--run", "gpt")
    rows = [line.split() for line in out.splitlines()[2:5]]
    assert (rows[0], rows[1][-1], rows[2]) == (["a0002", "15", "a", "copy"], "latest", ["a0002", "5", "DAMAGED"])
    found = json.loads(cli("ls", place, "--run", "gpt", "--json")[1])["runs"][0]
    assert found["latest"]["step"] == 7 and found["checkpoints"][0]["message"]
    assert cli("verify", place, "--run", "gpt", "--step", "15")[0] == 11


def test_ls_json(cli, made):
    status, out, err = cli("ls", made, "--json")
    found = json.loads(out)
    assert (status, err) == (0, "")
    assert found["schema"] == "tenuto.ls/1"
    assert [run["run"] for run in found["runs"]] == ["gpt", "small"]
    gpt = found["runs"][0]
    assert gpt["attempts"] == [1, 2]
    assert gpt["latest"] == {"run": "gpt", "attempt": 2, "step": 7}
    assert gpt["bytes"] == sum(row["bytes"] for row in gpt["checkpoints"])
    assert (gpt["owner"], gpt["best"]) == (None, {})
    assert 5 * 3600 <= gpt["checkpoints"][3].pop("age_s") < 6 * 3600
    assert gpt["checkpoints"][3] == {
        "attempt": 1,
        "step": 6,
        "state": "committed",
        "latest": False,
        "on_walk": False,
        "bytes": gpt["checkpoints"][0]["bytes"],
        "leaves": 3,
        "ranks": 1,
        "created": "2030-01-02T03:04:05Z",
        "metrics": {"loss": 1 / 6, "val_loss": "nan"},
        "notes": [],
        "tags": [],
        "pins": [],
        "best": [],
        "message": None,
        "verdict": None,
        "health": None,
        "spikes": {},
        "goes": None,
        "sealed": None,
    }
    assert gpt["checkpoints"][0]["metrics"]["late"] == 0.25


def test_ls_of_an_unknown_run_names_those_there_are(cli, made):
    status, out, err = cli("ls", made, "--run", "gtp")
    assert (status, out) == (11, "")
    assert err == "error: no run 'gtp' at /ckpts; there are: gpt, small\nhint: did you mean 'gpt'?\n"


def test_ls_of_an_empty_repository_and_of_a_claimed_run(cli, tmp_path):
    from tenuto.repo.ownership.claim import claim
    from tenuto.repo.repository import Repo
    from tenuto.store.registry import open_store

    repo = Repo.create_or_open(open_store(tmp_path / "ckpts"))
    assert cli("ls", tmp_path / "ckpts") == (0, "", "/ckpts: no runs yet\n")
    claim(repo, "new", None).release()
    assert cli("ls", tmp_path / "ckpts") == (0, "run new: no checkpoint yet; attempt 1 was begun\n", "")


def test_columns_escape_what_a_terminal_would_obey(capsys):
    table = Columns(("A", "B"))
    table.add("\x1b[31mred\x07", "line\nbreak \u202e é 中")
    table.print()
    assert capsys.readouterr().out.splitlines()[1] == "  \\x1b[31mred\\x07  line\\nbreak \\u202e é 中"


def test_ls_shows_a_page_of_each_run_and_says_how_much_is_left_out(cli, made):
    whole = cli("ls", made, "--all")
    assert whole == cli("ls", made, "--limit", "6") == cli("ls", made)
    status, out, err = cli("ls", made, "-n", "2")
    lines = [line.split()[:2] for line in whole[1].splitlines()]
    assert status == 0
    assert [line.split()[:2] for line in out.splitlines()] == [*lines[:4], *lines[8:]]
    assert err == "… and 4 more: tenuto ls /ckpts --run gpt --all\n"


def test_ls_says_what_the_latest_is_where_newer_ones_fill_the_page(cli, place):
    run = place / "runs/gpt"
    shutil.rmtree(run / "a0002/step-00000007")
    shutil.rmtree(run / "a0002/step-00000005")
    (run / "a0002/step-00000090").mkdir()
    shutil.copytree(run / "a0001/step-00000002", run / "a0002/step-00000091")
    _, out, err = cli("ls", place, "--run", "gpt", "--limit", "1")
    assert out.splitlines()[2].split() == ["a0002", "91", "a", "copy"]
    assert err.startswith("… and 5 more, latest is gpt/a0001/4: ")
    assert json.loads(cli("ls", place, "--run", "gpt", "--limit", "1", "--json")[1])["runs"][0]["latest"]["step"] == 4


def test_ls_json_is_complete_unless_a_limit_is_given(cli, made):
    whole = json.loads(cli("ls", made, "--json")[1])["runs"][0]
    assert (len(whole["checkpoints"]), whole["more"]) == (6, 0)
    page = json.loads(cli("ls", made, "--json", "--limit", "4")[1])["runs"][0]
    assert (page["checkpoints"], page["more"]) == (whole["checkpoints"][:4], 2)
    left_out = {"checkpoints": 0, "more": 0, "bytes": 0}
    assert {**page, **left_out} == {**whole, **left_out}


def test_a_page_is_the_beginning_of_everything_whatever_lies_there(cli, place):
    """What was removed, freed, damaged, copied or never finished, and foreign directories."""
    run = place / "runs/gpt"
    assert cli("rm", place, "5", "--run", "gpt", "--yes")[0] == 0
    (run / "a0001/step-00000006/manifest.json").write_bytes(b"?")
    (run / "a0001/step-00000002/manifest.json").unlink()
    (run / "a0001/step-00000077").mkdir()
    (run / "a0001/step-00000077/notes.txt").write_text("mine")
    shutil.copytree(run / "a0001/step-00000004", run / "a0002/step-00000015")
    shutil.rmtree(run / "a0002/step-00000005")
    whole = json.loads(cli("ls", place, "--json")[1])["runs"]
    for limit in range(1, 9):
        for all_of_it, page in zip(whole, json.loads(cli("ls", place, "--json", "-n", limit)[1])["runs"], strict=True):
            assert page["checkpoints"] == all_of_it["checkpoints"][:limit]
            assert page["latest"] == all_of_it["latest"]


def test_ls_cannot_both_show_all_and_keep_to_a_limit(cli, made):
    assert cli("ls", made, "--all", "--limit", "3")[0] == 2


def test_ls_shows_data_files_that_are_gone_or_cut_as_damaged_and_asks_no_more_for_it(cli, place, monkeypatch):
    gone = place / "runs/gpt/a0002/step-00000007/rank-00000.safetensors"
    cut = place / "runs/gpt/a0002/step-00000005/rank-00000.safetensors"
    gone.unlink()
    with cut.open("r+b") as file:
        file.truncate(cut.stat().st_size - 1)
    (place / "runs/gpt/a0001/step-00000008/rank-00000.index").unlink()
    walks = []
    walk = LocalStore.walk
    monkeypatch.setattr(
        LocalStore, "walk", lambda self, prefix, **options: walks.append(prefix) or walk(self, prefix, **options)
    )
    status, out, _ = cli("ls", place, "--run", "gpt")
    assert (status, out) == (
        0,
        """\
run gpt: 3 checkpoints, 594 KiB
  ATTEMPT  STEP  AGE     SIZE  late    loss  val_loss  STATE
  a0002       7  5 h  198 KiB  0.25  0.1429       0.5  latest, DAMAGED
  a0002       5  5 h  198 KiB           0.2       0.5  DAMAGED
  a0001       8  5 h  198 KiB         0.125       0.5  DAMAGED
  a0001       6  5 h  198 KiB        0.1667       nan  left behind
  a0001       4  5 h  198 KiB          0.25       0.5
  a0001       2  5 h  198 KiB           0.5       0.5
""",
    )
    of_one = [prefix for prefix in walks if prefix.endswith("step-00000006")]
    assert len(walks) == len(of_one) * (6 + 3), "a second look at the three that are damaged, none at the others"
    found = json.loads(cli("ls", place, "--run", "gpt", "--json")[1])["runs"][0]["checkpoints"]
    assert [row["state"] for row in found] == ["damaged"] * 3 + ["committed"] * 3
    size = cut.stat().st_size + 1
    assert [row["message"] for row in found[:3]] == [
        f"rank-00000.safetensors: missing (0 of the {size} bytes that were saved are there)",
        f"rank-00000.safetensors: cut ({size - 1} of the {size} bytes that were saved are there)",
        "rank-00000.index: missing, or cut",
    ]


def test_ls_does_not_take_a_save_that_commits_meanwhile_for_damaged(cli, place, monkeypatch):
    """Its data files are put, and its manifest, after the listing and before the manifest is read."""
    pack = place / "runs/gpt/a0002/step-00000007/rank-00000.safetensors"
    data = pack.read_bytes()
    pack.unlink()
    get = LocalStore.get

    def get_and_commit(self, name, **options):
        pack.write_bytes(data)
        return get(self, name, **options)

    walk = LocalStore.walk

    def walk_first(self, prefix, **options):
        if prefix.endswith("step-00000007"):
            monkeypatch.setattr(LocalStore, "get", get_and_commit)
        return walk(self, prefix, **options)

    monkeypatch.setattr(LocalStore, "walk", walk_first)
    assert cli("ls", place, "--run", "gpt")[1].splitlines()[2].split()[-1] == "latest"


def test_ls_beside_a_training_that_commits_and_frees_has_a_latest(cli, place, monkeypatch):
    """While `latest` is looked for, the next step commits and the listed one goes, as beside `keep.latest(1)`."""
    listed, latest = Repo.steps, lineage.latest
    looking, went = [], []

    def look(repo, run, **options):
        looking.append(run)
        return latest(repo, run, **options)

    def then_the_training_goes_on(self, run, attempt):
        found = listed(self, run, attempt)
        if looking == ["small"] and not went:
            went.append(attempt)
            save(Repo.open(open_store(place)), "small", [2], {"x": np.arange(5)})
            shutil.rmtree(place / "runs/small/a0001/step-00000001")
        return found

    monkeypatch.setattr(Repo, "steps", then_the_training_goes_on)
    monkeypatch.setattr(lineage, "latest", look)
    found = json.loads(cli("ls", place, "--run", "small", "--json")[1])["runs"]
    assert went, "the interleaving was not forced"
    assert [run["latest"] for run in found] == [{"run": "small", "attempt": 2, "step": 2}]


@pytest.mark.filterwarnings("ignore:tenuto. keep")
def test_ls_marks_the_best_by_what_training_judges_by(cli, tmp_path):
    """`max` and NaN too; of equals it is the newest. A page says that it has not looked further."""
    place = tmp_path / "ckpts"
    kept = keep.all() | keep.best(1, "loss") | keep.best(1, "accuracy", mode="max") | keep.best(1, "never")
    logged = [(3.0, 0.5), (1.0, 0.9), (float("nan"), 0.2), (1.0, float("nan")), (2.0, 0.1)]
    with tenuto.Checkpointer(place, {"w": np.zeros(3)}, save=every(steps=1), keep=kept) as ckpt:
        for loss, accuracy in logged:
            ckpt.step_done(loss=loss, accuracy=accuracy)
    _, out, _ = cli("ls", place)
    marked = {line.split()[1]: line.partition("best ")[2] for line in out.splitlines() if "best " in line}
    assert marked == {"4": "loss", "2": "accuracy"}
    found = json.loads(cli("ls", place, "--json")[1])["runs"][0]
    assert {metric: id["step"] for metric, id in found["best"].items()} == {"loss": 4, "accuracy": 2}
    assert [row["best"] for row in found["checkpoints"]] == [[], ["loss"], [], ["accuracy"], []]
    _, out, _ = cli("ls", place, "-n", "1")
    assert "best loss of these" in " ".join(out.split())


def test_ls_says_which_process_trains_a_run_now(cli, place):
    script = (
        "import sys\nfrom tenuto.model.ids import CheckpointId\nfrom tenuto.repo.ownership.claim import claim\n"
        "from tenuto.repo.repository import Repo\nfrom tenuto.store.registry import open_store\n"
        f"held = claim(Repo.open(open_store({str(place)!r})), 'gpt', CheckpointId('gpt', 2, 7))\n"
        "print('claimed', flush=True)\nsys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "claimed\n"
        lines = cli("ls", place)[1].splitlines()
        who = f"  training now: pid {process.pid} on {socket.gethostname()} ("
        assert lines[1].startswith(who) and [line for line in lines if "training now" in line] == lines[1:2]
        assert "since 2030-01-02 03:04 UTC (5 h ago)" in " ".join(" ".join(lines[1:3]).split())
        owner = json.loads(cli("ls", place, "--json", "--run", "gpt")[1])["runs"][0]["owner"]
        assert (owner["pid"], owner["alive"], owner["attempt"]) == (process.pid, True, 3)
    finally:
        process.kill()
        process.communicate()
    assert "training" not in cli("ls", place)[1]
    assert json.loads(cli("ls", place, "--json", "--run", "gpt")[1])["runs"][0]["owner"] is None


def test_ls_lists_what_matches_of_all_runs(cli, place):
    status, out, err = cli("ls", place, "--where", "loss < 0.3 and not verified", "--sort=-step", "--limit", "3")
    rest = "tenuto ls /ckpts --where 'loss < 0.3 and not verified' --sort=-step --all"
    assert (status, err) == (0, f"… and more: {rest}\n")
    assert [line.split()[:3] for line in out.splitlines()[1:-1]] == [
        ["gpt", "a0001", "8"],
        ["gpt", "a0002", "7"],
        ["gpt", "a0001", "6"],
    ]
    assert out.splitlines()[-1] == "the first 3 checkpoints"
    for limit in (("--limit", "4"), ("--all",)):
        _, out, err = cli("ls", place, "--where", "loss < 0.3 and not verified", *limit)
        assert (out.splitlines()[-1], err) == ("4 checkpoints", "")
    words = ("ls", place, "--run", "gpt", "--sort", "loss", "--limit", "2")
    assert cli(*words)[2] == "… and more: tenuto ls /ckpts --run gpt --sort loss --all\n"
    assert len(json.loads(cli(*words, "--json")[1])["checkpoints"]) == 2
    found = json.loads(cli("ls", place, "--where", "late < 1", "--json")[1])
    assert found["condition"] == "late < 1"
    (row,) = found["checkpoints"]
    assert (row["run"], row["step"], row["metrics"]["late"], row["latest"]) == ("gpt", 7, 0.25, True)
    assert [row["run"] for row in json.loads(cli("ls", place, "--sort", "run", "--json")[1])["checkpoints"]] == [
        *["gpt"] * 6,
        "small",
    ]
    assert cli("ls", place, "--run", "small", "--refresh")[1].splitlines()[1].split()[:3] == ["small", "a0001", "1"]
    assert cli("ls", place, "--run", "small", "--where", "step > 1 or loss > 9")[2] == "no checkpoint matches\n"


def test_ls_marks_what_is_wrong_with_what_matches_as_a_plain_listing_does(cli, tmp_path):
    place, state = tmp_path / "ckpts", {"w": np.zeros(3), "b": np.zeros(3)}
    with tenuto.Checkpointer(place, state, save=every(steps=1), keep=keep.all(), sinks=[]) as ckpt:
        for step in ckpt.steps(4):
            state["w"][0] = float("nan") if step == 2 else step
    repo = Repo.open(open_store(place))
    add_note(repo, CheckpointId("main", 1, 1), "suspect", {})
    (place / CheckpointId("main", 1, 2).manifest).write_bytes(b"no")
    marks = {}
    for words in ((), ("--sort", "step")):
        out = cli("ls", place, *words)[1]
        rows = {row.split()[-1]: row for row in out.splitlines()}
        marks[words] = [word in rows for word in ("SUSPECT", "DAMAGED", "infinities")]
        assert "UNHEALTHY: " in out and out.count("SUSPECT") == out.count("DAMAGED") == 1
    assert marks[()] == marks["--sort", "step"] == [True, True, True]
    assert not any(one.healthy for one in tenuto.Repository(place).query("not healthy"))
    assert [one.id.step for one in tenuto.Repository(place).query("not healthy", sort="step")] == [1, 2, 3]


def test_ls_refuses_what_a_query_cannot_be(cli, place):
    for words, code, problem in (
        (("--where", "loss <"), 2, "'loss <', column 7: not understood"),
        (("--where", "los < 1"), 2, "did you mean 'loss'?"),
        (("--sort", "los"), 2, "did you mean 'loss'?"),
        (("--where", "loss < 1", "--run", "gtp"), 11, "did you mean 'gpt'?"),
        (("--where", "loss < 1", "--trash"), 2, "--trash has no conditions"),
        (("--where", "loss < 1", "--all", "--limit", "3"), 2, "contradict each other"),
    ):
        status, out, err = cli("ls", place, *words)
        assert (status, out) == (code, "") and problem in " ".join(err.split()), (words, err)


def test_plain_ls_keeps_no_catalog(cli, place, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cli("ls", place)
    assert not (tmp_path / "cache").exists()
    cli("ls", place, "--where", "step > 1")
    assert len(list((tmp_path / "cache").rglob("*.sqlite"))) == 1
