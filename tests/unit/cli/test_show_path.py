"""`tenuto show WHERE PATH`: one leaf, one plain value, or what lies below."""

import json

import numpy as np
import pytest
import torch

import tenuto
from tenuto.cli.views.leaf_view import first_values, statistics

from .conftest import flip


def test_a_leaf(cli, made):
    assert cli("show", made, "model/layers.0.weight", "--run", "gpt") == (
        0,
        """\
gpt/a0002/7
  leaf   model/layers.0.weight
  holds  float32 [256, 64], 64.0 KiB
  first  0, 1, 2, 3, 4, 5, 6, 7, …
  min    0
  max    16383
  mean   8191.5
  zeros  1
""",
        "",
    )


def test_a_leaf_as_json(cli, made):
    status, out, _ = cli("show", made, "x", "--run", "small", "--json")
    found = json.loads(out)
    assert (status, found["schema"], found["checkpoint"]["step"]) == (0, "tenuto.show/1", 1)
    assert (found["path"], found["kind"], found["dtype"], found["shape"]) == ("x", "numpy", "int64", [5])
    assert (found["first"], found["bytes"], found["private"]) == ([0, 1, 2, 3, 4], 40, False)
    assert found["statistics"] == {"count": 5, "min": 0, "max": 4, "mean": 2.0, "zeros": 1}


def test_plain_values_and_what_lies_below(cli, made):
    assert cli("show", made, "name", "--run", "gpt")[1] == "gpt/a0002/7\n  name  'gpt'\n"
    assert json.loads(cli("show", made, "history", "--run", "gpt", "--json")[1])["value"] == [1.0, 2.0, "nan"]
    _, out, _ = cli("show", made, "optimizer", "--run", "gpt", "--depth", 1)
    assert out.splitlines()[:2] == ["gpt/a0002/7", "optimizer"] and out.count("\n") == 4
    below = json.loads(cli("show", made, "optimizer/state/w", "--run", "gpt", "--json")[1])["below"]
    assert below == {"optimizer/state/w/exp_avg": "float64 [256, 64]", "optimizer/state/w/step": "3"}


def test_nothing_there(cli, made):
    status, out, err = cli("show", made, "nope", "--run", "gpt")
    assert (status, out) == (11, "") and "has nothing at 'nope'" in err
    assert err.endswith("\nhint: tenuto show /ckpts --run gpt --step a0002/7 lists what there is\n")
    assert cli("show", made, "--run", "gpt", "--step", "a0002/7")[0] == 0
    for step in ("9", "a0002/9"):  # as other commands take a checkpoint
        err = cli("show", made, step, "--run", "gpt")[2]
        assert err.endswith(f"\nhint: tenuto show /ckpts --run gpt --step {step} for a checkpoint\n")


def test_a_damaged_leaf_is_never_shown(cli, place):
    flip(place / "runs/gpt/a0002/step-00000007/rank-00000.safetensors", 5000)
    status, out, err = cli("show", place, "model/layers.0.bias", "--run", "gpt")
    assert (status, out) == (12, "") and err.startswith("error: model/layers.0.bias is damaged: ")


@pytest.mark.parametrize(
    ("value", "first", "facts"),
    [
        (
            torch.tensor([1.0, 3.0, float("nan")]).bfloat16(),
            1.0,
            {"count": 3, "min": 1.0, "max": 3.0, "mean": 2.0, "nan": 1},
        ),
        (
            torch.tensor([[0.0, 2.0]]).to(torch.float8_e5m2),
            0.0,
            {"count": 2, "min": 0.0, "max": 2.0, "mean": 1.0, "zeros": 1},
        ),
        (np.array([np.inf, -np.inf]), np.inf, {"count": 2, "infinite": 2}),
        (np.array([True, False]), True, {"count": 2, "min": False, "max": True, "mean": 0.5, "zeros": 1}),
        (np.array(["ab"]), "ab", {}),
        (np.array([1 + 2j]), 1 + 2j, {}),
        (torch.tensor(2**60), 2**60, {"count": 1, "min": 2**60, "max": 2**60, "mean": 2.0**60}),
        (torch.empty(0, 3), None, {"count": 0}),
    ],
)
def test_every_type_of_element(tmp_path, value, first, facts):
    tenuto.save({"v": value}, tmp_path, step=1)
    with tenuto.open(tmp_path) as opened:
        assert statistics(opened["v"]) == facts
        assert first_values(opened["v"])[:1] == ([] if first is None else [first])


def test_statistics_of_a_leaf_in_several_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("tenuto.cli.views.leaf_view.BLOCK_BYTES", 100)
    values = np.random.default_rng(0).normal(size=(50, 7))
    tenuto.save({"v": values}, tmp_path, step=1)
    with tenuto.open(tmp_path) as opened:
        found = statistics(opened["v"])
    assert (found["count"], found["min"], found["max"]) == (350, values.min(), values.max())
    assert found["mean"] == pytest.approx(values.mean())
