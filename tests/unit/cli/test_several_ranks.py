"""The commands on a checkpoint that three ranks have saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import tenuto
from support.saves_of_ranks import save_jointly, whole
from tenuto.errors import StateError
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    place = tmp_path / "ranks"
    save_jointly(Repo.create_or_open(open_store(place)), 3)
    return place


def test_leaves_are_exported_as_wholes(cli: Any, ranks: Path, tmp_path: Path) -> None:
    out = tmp_path / "all.safetensors"
    status, _, err = cli("export", ranks, out)
    assert status == 0, err
    found = load_file(out)
    assert found.keys() == {"rows", "columns", "bias", "none"}
    for name, value in whole(2)["model"].items():
        assert np.array_equal(found[name], value)
    assert cli("export", ranks, tmp_path / "one.safetensors", "--include", "model/columns", "--strip", "model/")[0] == 0
    assert np.array_equal(load_file(tmp_path / "one.safetensors")["columns"], whole(2)["model"]["columns"])


def test_a_torch_file_has_the_whole_state_and_nothing_of_single_ranks(cli: Any, ranks: Path, tmp_path: Path) -> None:
    out = tmp_path / "all.pt"
    status, _, err = cli("export", ranks, out)
    assert status == 0, err
    found = torch.load(out, weights_only=True)
    assert found["lr"] == 0.5 and "mine" not in found
    for name, value in whole(2)["model"].items():
        assert np.array_equal(np.asarray(found["model"][name]), value)


def test_a_removed_one_comes_back_and_verifies(cli: Any, ranks: Path) -> None:
    assert cli("rm", ranks, "1", "--yes")[0] == 0
    assert cli("undelete", ranks, "1")[0] == 0
    status, out, _ = cli("verify", ranks, "--json")
    assert (status, json.loads(out)["ok"], len(json.loads(out)["checked"])) == (0, True, 2)


def test_keep_frees_the_table_of_parts_with_the_rest(cli: Any, ranks: Path) -> None:
    assert cli("keep", ranks, "--latest", "1", "--yes")[0] == 0
    left = [path.name for path in ranks.glob("runs/main/a0001/step-00000001/*")]
    assert "boxes.index" not in left and not [name for name in left if name.startswith("rank-")], left
    assert cli("verify", ranks)[0] == 0


def test_a_rank_goes_with_a_path(cli: Any, ranks: Path) -> None:
    status, _, err = cli("show", ranks, "--rank", 1)
    assert status == 2 and "--rank goes with a PATH" in err
    status, _, err = cli("show", ranks, "model", "--rank", 3)
    assert status == 2 and "there is no rank 3" in err


def test_what_is_each_ranks_own_is_no_plain_value_of_the_whole(ranks: Path) -> None:
    with tenuto.open(ranks) as opened, pytest.raises(StateError, match="seed"):
        assert opened.plain_paths() == ["lr"]
        opened.plain("seed")
