import json

import numpy as np
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
gpt/a0002/7  (latest)
  lies in   /ckpts/runs/gpt/a0002/step-00000007
  holds     198 KiB, 3 leaves in 1 pack
  saved     2030-01-02T03:04:05Z, save id <32 digits>
  content   <64 digits>
  saved by  python 3.11
  parent    gpt/a0001/4
  progress  epoch 0, step 7
  metrics   late 0.25, loss 0.142857, val_loss 0.5

certificate
  reasons  shuffled by hand
  covers   model
           step and epoch

state
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
""",
        "",
    )


def test_show_depth_sums_up(cli, made):
    _, out, _ = cli("show", made, "--run", "gpt", "--depth", 1)
    assert out.partition("state\n")[2].splitlines()[:2] == [
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
    assert cli("show", place)[1].startswith("small/a0001/1  (latest)\n")


def test_show_by_every_spelling(cli, made):
    for words in (["--run", "gpt", "--step", "5"], ["--step", "gpt/a0002/5"], ["--run", "gpt", "--step", "a0002/5"]):
        assert cli("show", made, *words)[1].startswith("gpt/a0002/5\n")


def test_show_of_what_is_not_there_names_what_is_near(cli, made):
    status, _, err = cli("show", made, "--run", "gpt", "--step", "9")
    assert (status, err.splitlines()[0]) == (
        11,
        "error: run 'gpt' has no checkpoint of step 9; the nearest are 4, 5, 6, 7, 8",
    )


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
        _, out, _ = cli("show", place)
        told = out.partition("certificate\n")[2].partition("\n\nstate")[0].splitlines()
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
    assert "  not logged  val_loss, which keep.best(1, 'val_loss', mode='min') goes by\n" in out
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
