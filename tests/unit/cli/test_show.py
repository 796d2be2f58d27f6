import json
import re

import numpy as np
import pytest
import torch

import tenuto
from tenuto import every, keep
from tenuto.cli.views.state_tree import lines, plain_text
from tenuto.state.encode.flattener import flatten

from .conftest import flip


def test_show_whole(cli, made):
    assert cli("show", made, "--run", "gpt") == (
        0,
        """\
gpt/a0002/7  latest
  resume   unknown: its certificate has no verdict
  step     7 (epoch 0), after gpt/a0001/4
  saved    2030-01-02 03:04 UTC (5 h ago)
  metrics  late 0.25, loss 0.142857, val_loss 0.5
  size     198 KiB in 3 tensors
  lies in  /ckpts/runs/gpt/a0002/step-00000007

  ENTRY      TENSORS      SIZE  HOLDS
  model            2  66.0 KiB  float32, float64
  optimizer        1   128 KiB  float64
  name                          'gpt'
  history                       [1.0, 2.0, nan]
  empty                         {}
""",
        "more: tenuto show /ckpts --run gpt --leaves --certificate --private\n",
    )


def test_show_leaves_has_every_tensor_and_value(cli, made):
    _, out, _ = cli("show", made, "--run", "gpt", "--leaves")
    assert (
        out
        == """\
gpt/a0002/7
  model              2 leaves            66.0 KiB
    layers.0.weight  float32 [256, 64]   64.0 KiB
    layers.0.bias    float64 [256]       2.00 KiB
  optimizer          1 leaf               128 KiB
    state            1 leaf               128 KiB
      w              1 leaf               128 KiB
        exp_avg      float64 [256, 64]    128 KiB
        step         3
    param_groups     [{lr: 0.1, betas: (0.9, 0.99), nesterov: False}]
  name               'gpt'
  history            [1.0, 2.0, nan]
  empty              {}
"""
    )


def test_show_certificate_has_what_saved_it_and_what_identifies_it(cli, made):
    _, out, _ = cli("show", made, "--run", "gpt", "--certificate")
    assert (
        out
        == """\
gpt/a0002/7
  reasons   shuffled by hand
  covers    model
            step and epoch
  saved by  python 3.11
  save id   <32 digits>
  content   <64 digits>
"""
    )


@pytest.mark.filterwarnings("ignore:tenuto. keep")
def test_a_page_of_a_training_of_many_tensors_fits_a_small_terminal(cli, tmp_path):
    """More than 200 tensors, more entries, metrics and tags than there is room for, and a certificate with much to
    say."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(40)))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    state |= {f"metric_{number:02}_of_the_evaluation_suite": torch.zeros(2) for number in range(12)}
    place, run = tmp_path / "ckpts", "a-run-with-a-long-name-2030-01-02-seed-0"
    kept = keep.latest(9) | keep.best(1, "val_loss") | keep.best(2, "accuracy/top-5/of-all", mode="max")
    loader = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4, shuffle=True)
    with tenuto.Checkpointer(place, state, run=run, save=every(steps=1), keep=kept) as ckpt:
        for batch in loader:
            model(batch).square().mean().backward()
            optimizer.step()
            ckpt.step_done(**{f"metrics/{number}": number / 7 for number in range(30)})
    for number in range(5):
        assert cli("tag", place, f"release-candidate-{number}")[0] == 0
    status, out, err = cli("show", place)
    lines = [*out.splitlines(), *err.splitlines()]
    assert status == 0 and len(lines) <= 25, out
    # What cannot be broken: the place, and a line to copy.
    assert [line for line in lines if len(line) > 80 and not line.startswith(("  lies in ", "more: "))] == []
    words = " ".join(out.split())
    assert "model 80 3.12 KiB float32" in words and "optimizer 240" in words
    assert "not logged" in words and "and 22 more" in words and "tagged release-candidate-0" in words


def test_show_in_colour_says_no_more_and_no_less(cli, made, monkeypatch):
    plain = cli("show", made, "--run", "gpt")
    monkeypatch.delenv("NO_COLOR")
    assert cli("show", made, "--run", "gpt") == plain


def test_show_depth_sums_up(cli, made):
    _, out, _ = cli("show", made, "--run", "gpt", "--depth", 1)
    assert out.splitlines()[1:3] == [
        "  model      2 leaves   66.0 KiB",
        "  optimizer  1 leaf      128 KiB",
    ]


def test_show_json(cli, made):
    status, out, _ = cli("show", made, "--run", "gpt", "--step", "a0001/6", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["schema"] == "tenuto.show/1"
    assert (found["checkpoint"], found["latest"]) == ({"run": "gpt", "attempt": 1, "step": 6}, False)
    assert found["leaves"][0] == {
        "path": "model/layers.0.weight",
        "dtype": "float32",
        "shape": [256, 64],
        "bytes": 65536,
        "private": False,
    }
    assert found["values"]["optimizer/state/w/step"] == "3"
    assert found["metrics"]["val_loss"] == "nan"


def test_show_takes_the_only_run_or_main_or_asks(cli, made, place):
    status, _, err = cli("show", made)
    assert (status, err) == (2, "error: which run? There are gpt, small\nhint: --run gpt\n")
    import shutil

    shutil.rmtree(place / "runs/gpt")
    assert cli("show", place)[1].startswith("small/a0001/1  latest\n")


def test_show_by_every_spelling(cli, made):
    for words in (["--run", "gpt", "--step", "5"], ["--step", "gpt/a0002/5"], ["--run", "gpt", "--step", "a0002/5"]):
        assert cli("show", made, *words)[1].startswith("gpt/a0002/5  verified\n")


def test_show_of_what_is_not_there_names_what_is_near(cli, made):
    status, _, err = cli("show", made, "--run", "gpt", "--step", "9")
    assert (status, err.splitlines()[0]) == (
        11,
        "error: run 'gpt' has no checkpoint of step 9; the nearest are 4, 5, 6, 7, 8",
    )


def test_show_of_one_that_verify_found_damaged_says_what_a_resume_does(cli, place):
    assert "damage" not in cli("show", place, "--run", "gpt")[1]
    (data,) = place.glob("runs/gpt/a0002/step-00000007/rank-00000.safetensors")
    content = bytearray(data.read_bytes())
    content[9000] ^= 1
    data.write_bytes(content)
    assert cli("verify", place, "--note")[0] == 12
    out = cli("show", place, "--run", "gpt")[1]
    assert "damage   `tenuto verify` found some; a resume passes over this checkpoint" in out


def test_show_says_when_it_was_found_whole(cli, place):
    assert cli("verify", place, "--read", "100%", "--note")[0] == 0
    out = cli("show", place, "--run", "gpt")[1]
    (row,) = [line for line in out.splitlines() if line.startswith("  verified ")]
    assert " ago)" in row and row.endswith(" read")
    (note,) = [
        note
        for note in json.loads(cli("show", place, "--run", "gpt", "--json")[1])["notes"]
        if note["kind"] == "verified"
    ]
    assert note["created"] >= note["begun"] and note["bytes"] > 0


def test_show_of_a_damaged_one_says_so(cli, place):
    flip(place / "runs/gpt/a0002/step-00000007/rank-00000.index", 300)
    status, _, err = cli("show", place, "--run", "gpt")
    assert status == 12
    assert err.endswith("hint: tenuto verify WHERE names all that is damaged\n")


def test_show_gives_each_phrase_of_the_certificate_its_line(cli, tmp_path, monkeypatch):
    place = tmp_path / "ckpts"
    with tenuto.Checkpointer(place, {"n": 1, "model": torch.nn.Linear(2, 2)}) as ckpt:
        ckpt.step_done()
    for width in (80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        _, out, _ = cli("show", place, "--certificate")
        told = out.splitlines()
        assert max(map(len, told)) <= min(width, 100)
        at = next(number for number, line in enumerate(told) if line.startswith("  covers "))
        assert [line[14:] for line in told[at : at + 3]] == ["n", "model", "step and epoch"]
        assert "              train or eval mode of modules" in told


def test_show_says_which_metric_that_a_policy_goes_by_is_not_logged(cli, tmp_path):
    place = tmp_path / "ckpts"
    kept = keep.latest(9) | keep.best(1, "val_loss")
    with tenuto.Checkpointer(place, {"n": 1}, save=every(steps=1), keep=kept) as ckpt:
        ckpt.step_done(loss=1.0)
        ckpt.step_done(val_loss=2.0)
    _, out, _ = cli("show", place, "--step", "1")
    assert "  not logged  val_loss, which keep.best(1, 'val_loss', mode='min') uses\n" in out
    found = json.loads(cli("show", place, "--step", "1", "--json")[1])
    assert found["unlogged"] == {"val_loss": "keep.best(1, 'val_loss', mode='min')"}
    assert "not logged" not in cli("show", place, "--step", "2")[1]
    assert json.loads(cli("show", place, "--step", "2", "--json")[1])["unlogged"] == {}


def test_lines_of_aliases_and_single_values():
    shared = np.zeros(3)
    state = {"a": shared, "b": {"c": shared}, "n": 2**80}
    flattened = flatten(state)
    told = [(line.path, line.what) for line in lines(flattened.tree, flattened.specs)]
    assert told == [("a", "float64 [3]"), ("b", "0 leaves"), ("b/c", "the same as a"), ("n", str(2**80))]
    single = flatten(np.zeros((), np.float32))
    assert [line.what for line in lines(single.tree, single.specs)] == ["float32"]


def test_plain_text_is_shortened():
    assert plain_text("x" * 500).endswith(" …")
    assert len(plain_text(list(range(1000)))) <= 56


def test_show_says_where_the_time_of_real_saves_went(cli, tmp_path):
    with tenuto.Checkpointer(tmp_path / "ckpts", {"w": np.zeros(1000)}, save=every(steps=1), keep=keep.all()) as ckpt:
        for _ in ckpt.steps(2):
            pass
    status, out, _ = cli("show", tmp_path / "ckpts", "--timing", "--json")
    found = json.loads(out)
    assert (status, found["schema"], found["run"]) == (0, "tenuto.timing/1", "main")
    assert [one["checkpoint"]["step"] for one in found["checkpoints"]] == [1, 2]
    for one in found["checkpoints"]:
        assert one["bytes"] > 8000 and one["bandwidth"] > 0
        assert 0 < one["timing"]["capture_s"] < one["held_s"]
        assert one["message"] is None
    assert "timing" not in cli("show", tmp_path / "ckpts")[1], "it is no part of where it was saved"


def test_show_says_how_an_encoded_checkpoint_is_stored(cli, place):
    state = {"frozen": torch.randn(300_000), "trained": torch.zeros(100_000)}
    with tenuto.Checkpointer(place, state, save=every(steps=1), keep=keep.all(), encoding="dedupe") as ckpt:
        for _ in ckpt.steps(2):
            state["trained"] += torch.randn(100_000)
    _, out, _ = cli("show", place)
    row = r"  stored +\d+ KiB of 1\.5\d MiB, 1\.1\d MiB are named in others; chunks are stored\n +as they are\n"
    assert re.search(row, out), out
    assert re.search(r"  size +1\.5\d MiB in \d tensors", out), out
    _, out, _ = cli("show", place, "--json")
    stored = json.loads(out)["stored"]
    assert 1_200_000 <= stored["named_bytes"] < 1_210_000
    assert stored["raw_bytes"] >= 1_600_000 > stored["written_bytes"] >= 400_000
    _, out, _ = cli("show", place, "--certificate")
    assert "named_bytes" not in out


def test_data_files_of_an_earlier_checkpoint_are_looked_for_in_its_directory(cli, tmp_path):
    places = tenuto.Mirror(str(tmp_path / "one"), str(tmp_path / "two"))
    state = {"frozen": np.arange(50_000.0)}
    with tenuto.Checkpointer(places, state, save=every(steps=1), keep=keep.all(), encoding="dedupe") as ckpt:
        for _ in ckpt.steps(2):
            pass
    out = cli("show", tmp_path / "one")[1]
    assert "rests on" in out and "no location" not in out
    assert out.count("data files in") == out.count("1 of 1") == 2


def test_show_says_nothing_of_it_where_a_checkpoint_is_stored_as_it_is(cli, made):
    _, out, _ = cli("show", made, "--run", "gpt")
    assert "stored" not in out
    _, out, _ = cli("show", made, "--run", "gpt", "--json")
    assert json.loads(out)["stored"] is None


def test_why_says_the_policys_reason_a_part_a_line(cli, tmp_path):
    state = {"w": np.zeros(8)}
    with tenuto.Checkpointer(tmp_path, state, save=every(auto="20%", mtbf_hours=0.0001)) as ckpt:
        for _ in ckpt.steps(100_000):
            if ckpt.stats.committed > 2:
                ckpt.stop()
    for one in tenuto.Repository(tmp_path).checkpoints()[1:2]:
        status, out, _ = cli("show", str(tmp_path), "--step", str(one.step), "--why")
        assert status == 0 and "since the last save\n" in out and "\n            best is" in out, out
        out = " ".join(out.split())
        assert "a save blocks" in out and "a failure every 0.36 s (as given)" in out
        assert "of the time goes into saves and what failures lose, restarts left out (every auto)" in out
    status, out, err = cli("show", str(tmp_path), "--why", "--leaves")
    assert status == 2 and "--why stands alone" in err
