import json

import numpy as np
import pytest
from safetensors.numpy import load_file

import tenuto

from .conftest import STATE, flip


def test_export_writes_the_models_weights_under_their_own_names(cli, made, tmp_path):
    out = tmp_path / "model.safetensors"
    said = f"{out}: 2 tensors of entry model, step 7 (gpt/a0002/7), 66.0 KiB in 1 ms; read back by safetensors\n"
    assert cli("export", made, out, "--run", "gpt") == (0, said, "")
    found = load_file(out)
    assert found.keys() == {"layers.0.weight", "layers.0.bias"}
    np.testing.assert_array_equal(found["layers.0.weight"], STATE["model"]["layers.0.weight"])
    assert cli("restore", made, out, "--run", "gpt", "--force") == (0, said, "")
    best = ("--step", "best:loss:min", "--force", "--json")
    assert json.loads(cli("export", made, out, "--run", "gpt", *best)[1])["checkpoint"]["step"] == 8


def test_export_of_a_state_without_a_model_writes_all(cli, made, tmp_path):
    out = tmp_path / "x.safetensors"
    assert cli("export", made, out, "--run", "small")[0] == 0
    assert load_file(out).keys() == {"x"}


def test_export_of_an_entry(cli, made, tmp_path):
    out = tmp_path / "o.safetensors"
    assert cli("export", made, out, "--run", "gpt", "--entry", "optimizer")[0] == 0
    assert load_file(out).keys() == {"state/w/exp_avg"}
    status, _, err = cli("export", made, out, "--run", "gpt", "--entry", "modle", "--force")
    assert (status, err) == (
        2,
        "error: gpt/a0002/7 has no entry 'modle' with tensors in it; there are: model, optimizer\n"
        "hint: did you mean 'model'?\n",
    )
    assert cli("export", made, out, "--run", "gpt", "--entry", "model", "--strip", "model/")[0] == 2


def test_export_of_several_models_asks_which(cli, tmp_path):
    nn = pytest.importorskip("torch").nn
    tenuto.save({"generator": nn.Linear(2, 2), "critic": nn.Linear(2, 1), "epoch": 3}, tmp_path / "ckpts")
    out = tmp_path / "gan.safetensors"
    status, _, err = cli("export", tmp_path / "ckpts", out)
    assert (status, err) == (
        2,
        "error: main/a0001/0 has 2 models: generator, critic\n"
        "hint: --entry generator, or --include '*' for every tensor of the state\n",
    )
    assert cli("export", tmp_path / "ckpts", out, "--entry", "critic")[0] == 0
    assert load_file(out).keys() == {"weight", "bias"}
    assert cli("export", tmp_path / "ckpts", out, "--include", "*", "--force")[0] == 0
    assert len(load_file(out)) == 4


def test_a_model_with_tied_weights_loads_all_of_what_was_exported(cli, tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    class Gpt(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.wte = torch.nn.Embedding(10, 4)
            self.head = torch.nn.Linear(4, 10, bias=False)
            self.head.weight = self.wte.weight
            self.register_buffer("mask", torch.ones(3), persistent=False)

    model, out = Gpt(), tmp_path / "model.safetensors"
    tenuto.save({"model": model, "ema": {"head": model.head.weight, "x": torch.ones(2)}}, tmp_path / "ckpts")
    status, said, note = cli("export", tmp_path / "ckpts", out)
    assert (status, said.split(", ")[0]) == (0, f"{out}: 2 tensors of entry model")
    assert note == "note: tied to another tensor, and written under their own names too: model/wte.weight\n"
    loaded = Gpt()
    loaded.load_state_dict(load_file(out))
    assert torch.equal(loaded.head.weight, model.head.weight) and loaded.head.weight is loaded.wte.weight
    # The tensor that they share is saved with the model.
    assert cli("export", tmp_path / "ckpts", out, "--entry", "ema", "--force")[0] == 0
    assert load_file(out)["head"].equal(model.head.weight) and load_file(out).keys() == {"head", "x"}


def test_export_refuses_to_strip_what_no_name_begins_with(cli, made, tmp_path):
    status, _, err = cli("export", made, tmp_path / "a.safetensors", "--run", "gpt", "--strip", "modle/")
    assert (status, err.splitlines()[1]) == (2, "hint: did you mean 'model/'?")
    assert list(tmp_path.glob("*.safetensors")) == []


def test_export_of_every_tensor(cli, made, tmp_path):
    out = tmp_path / "all.safetensors"
    status, said, err = cli("export", made, out, "--run", "gpt", "--include", "*")
    assert (status, said) == (0, f"{out}: 3 tensors, step 7 (gpt/a0002/7), 198 KiB in 1 ms; read back by safetensors\n")
    assert err == "note: a safetensors file holds no plain values: 8 are left out; a *.pt file holds them\n"
    found = load_file(out)
    assert found.keys() == {"model/layers.0.weight", "model/layers.0.bias", "optimizer/state/w/exp_avg"}
    np.testing.assert_array_equal(found["model/layers.0.weight"], STATE["model"]["layers.0.weight"])
    np.testing.assert_array_equal(found["model/layers.0.bias"], STATE["model"]["layers.0.bias"])
    assert [path.name for path in tmp_path.iterdir()] == ["all.safetensors"]


def test_export_a_part_under_its_own_names(cli, made, tmp_path):
    out = tmp_path / "model.safetensors"
    cli("export", made, out, "--run", "gpt", "--include", "model", "--exclude", "*bias", "--strip", "model/")
    assert load_file(out).keys() == {"layers.0.weight"}
    status, _, err = cli("export", made, tmp_path / "x.safetensors", "--run", "gpt", "--strip", "model/layers.0.bias")
    assert status == 2
    assert "has none" in err
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_export_of_nothing_is_refused_and_writes_nothing(cli, made, tmp_path):
    status, out, err = cli("export", made, tmp_path / "o.safetensors", "--run", "gpt", "--include", "nothing*")
    assert (status, out) == (2, "")
    assert "is left by --include and --exclude" in err
    assert not list(tmp_path.glob("*.safetensors"))


def test_export_passes_over_a_damaged_latest_aloud(cli, place, tmp_path):
    flip(place / "runs/gpt/a0002/step-00000007/rank-00000.safetensors", 5000)
    status, out, err = cli("export", place, tmp_path / "a.safetensors", "--run", "gpt", "--json")
    found = json.loads(out)
    assert status == 0
    assert (found["schema"], found["checkpoint"]["step"], found["leaves"]) == ("tenuto.export/1", 5, 2)
    assert [skipped["checkpoint"]["step"] for skipped in found["skipped"]] == [7]
    assert err.startswith("warning: step 7 of run gpt is damaged and was passed over: ")
    assert load_file(tmp_path / "a.safetensors").keys()


def test_export_of_a_damaged_step_leaves_no_file(cli, place, tmp_path):
    flip(place / "runs/gpt/a0002/step-00000007/rank-00000.safetensors", 5000)
    (tmp_path / "out").mkdir()
    status, out, err = cli("export", place, tmp_path / "out/a.safetensors", "--run", "gpt", "--step", "7")
    assert (status, out) == (12, "")
    assert err.startswith("error: model/layers.0.bias is damaged: ")
    assert list((tmp_path / "out").iterdir()) == []


def test_export_replaces_only_by_force(cli, made, tmp_path):
    out = tmp_path / "a.safetensors"
    out.write_text("mine")
    status, _, err = cli("export", made, out, "--run", "gpt")
    assert (status, out.read_text()) == (2, "mine")
    assert err == f"error: {out} is there already\nhint: --force replaces it\n"
    assert cli("export", made, out, "--run", "gpt", "--force")[0] == 0
    assert load_file(out)


def test_export_into_no_directory_is_a_store_error(cli, made, tmp_path):
    status, _, err = cli("export", made, tmp_path / "nowhere/a.safetensors", "--run", "gpt")
    assert (status, "cannot be written: No such file or directory" in err) == (18, True)


def test_export_knows_two_kinds_of_files(cli, made, tmp_path):
    status, _, err = cli("export", made, tmp_path / "a.bin", "--run", "gpt")
    assert (status, err.splitlines()[1]) == (2, "hint: name it a.safetensors")
    assert cli("export", made, tmp_path / "a.pt", "--strip", "model/")[0] == 2


def test_export_of_a_run_without_checkpoints(cli, tmp_path):
    from tenuto.repo.ownership.claim import claim
    from tenuto.repo.repository import Repo
    from tenuto.store.registry import open_store

    claim(Repo.create_or_open(open_store(tmp_path / "ckpts")), "new", None).release()
    assert cli("export", tmp_path / "ckpts", tmp_path / "a.safetensors")[0] == 11


def test_export_pt(cli, made, tmp_path):
    torch = pytest.importorskip("torch")
    out = tmp_path / "state.pt"
    status, _, err = cli("export", made, out, "--run", "gpt", "--exclude", "optimizer/state")
    assert (status, err) == (0, "note: 2 of type ndarray written as a tensor\n")
    found = torch.load(out, weights_only=True)
    assert torch.equal(found["model"]["layers.0.weight"], torch.from_numpy(STATE["model"]["layers.0.weight"]))
    assert found["name"] == "gpt"
    assert found["optimizer"] == {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "nesterov": False}]}
