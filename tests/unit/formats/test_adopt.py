"""Checkpoints of other tools adopted in place: nothing of them is copied, changed or removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import tenuto
from tenuto.api.adopt import adopt
from tenuto.errors import CorruptionError, Unserialisable, UsageError
from tenuto.maintenance.gc import execute as execute_gc
from tenuto.maintenance.gc import plan_gc
from tenuto.maintenance.remove import execute as remove
from tenuto.maintenance.remove import plan_remove
from tenuto.maintenance.verify import assert_whole


def bytes_below(path: Path) -> dict[str, bytes]:
    return {str(one.relative_to(path)): one.read_bytes() for one in path.rglob("*") if one.is_file()}


def made(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Linear(200, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 200)).sum().backward()
    optimizer.step()
    numpy: Any = np.random.RandomState(1).get_state()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "numpy": numpy}
    state |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(2)}
    path = tmp_path / "checkpoint-5"
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=path)
    return path, state


def test_a_directory_of_dcp_becomes_a_repository_where_it_lies(tmp_path: Path) -> None:
    path, state = made(tmp_path)
    before = bytes_below(path)
    (adopted,) = adopt(path)
    assert adopted.step == 5
    after = bytes_below(path)
    assert {name: after[name] for name in before} == before
    linked = path / "runs/main/a0001/step-00000005/rank-00000.pack"
    assert linked.samefile(path / "__0_0.distcp")

    found: Any = tenuto.load(path).state
    assert torch.equal(found["model"]["weight"], state["model"]["weight"])
    assert torch.equal(found["optimizer"]["state"]["0"]["exp_avg"], state["optimizer"]["state"][0]["exp_avg"])
    assert found["epoch"] == 3 and (found["numpy"][1] == state["numpy"][1]).all() and found["empty"].shape == (0, 3)
    with tenuto.open(path) as opened:
        assert torch.equal(opened["model/weight"][7:9, ::3], state["model"]["weight"][7:9, ::3])
        assert opened.bytes_read < 300_000
    model = nn.Linear(200, 300)
    tenuto.load(path, {"model": model})
    assert torch.equal(model.weight, state["model"]["weight"])
    assert_whole(tenuto.Repository(path).repo)


def test_every_byte_of_an_adopted_file_is_verified(tmp_path: Path) -> None:
    path, _ = made(tmp_path)
    adopt(path)
    data = path / "__0_0.distcp"
    whole = data.read_bytes()
    for at in range(7, len(whole), len(whole) // 11):  # tensors, headers of archives, pickles
        with data.open("r+b") as file:
            file.seek(at)
            file.write(bytes([whole[at] ^ 1]))
        with pytest.raises(CorruptionError):
            assert_whole(tenuto.Repository(path).repo)
        data.write_bytes(whole)
    assert_whole(tenuto.Repository(path).repo)


def test_safetensors_and_files_of_torch_are_adopted_into_a_repository_beside_them(tmp_path: Path) -> None:
    where = tmp_path / "repository"
    save_file({"a": torch.ones(5, 5), "b": torch.ones(3, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    weight = torch.arange(9.0)
    torch.save({"w": weight, "tied": weight, "numbers": np.arange(5), "lr": 0.1}, tmp_path / "x.pt")
    adopt(tmp_path / "model.safetensors", where, step=4)
    adopt(tmp_path / "x.pt", where, run="pt")
    assert tenuto.load(where).state["model"]["a"].shape == (5, 5)
    found: Any = tenuto.load(where, run="pt").state
    assert torch.equal(found["w"], weight) and found["tied"].data_ptr() == found["w"].data_ptr()
    assert (found["numbers"] == np.arange(5)).all() and found["lr"] == 0.1
    assert (where / "runs/main/a0001/step-00000004/rank-00000.safetensors").samefile(tmp_path / "model.safetensors")
    assert_whole(tenuto.Repository(where).repo)

    # a copy elsewhere has bytes of its own
    tenuto.Repository(where).replicate(tmp_path / "copy")
    assert torch.equal(tenuto.load(tmp_path / "copy", run="pt").state["w"], weight)
    assert_whole(tenuto.Repository(tmp_path / "copy").repo)


def test_removing_and_freeing_a_checkpoint_leaves_the_files(tmp_path: Path) -> None:
    path, _ = made(tmp_path)
    before = bytes_below(path)
    adopt(path, tmp_path / "repository")
    adopt(path, tmp_path / "repository", step=6)
    assert os.stat(path / "__0_0.distcp").st_nlink == 3
    repo = tenuto.Repository(tmp_path / "repository").repo
    remove(repo, plan_remove(repo, [tenuto.Repository(tmp_path / "repository").find(step=5)]))
    execute_gc(repo, plan_gc(repo, grace_s=0))
    assert os.stat(path / "__0_0.distcp").st_nlink == 2 and bytes_below(path) == before


def test_what_cannot_be_adopted_is_named(tmp_path: Path) -> None:
    where = tmp_path / "repository"
    torch.save({"t": torch.ones(3, 4).t()}, tmp_path / "a.pt")
    with pytest.raises(Unserialisable, match="t does not lie in"):
        adopt(tmp_path / "a.pt", where)
    base = torch.ones(8)
    torch.save({"a": base, "b": base[2:]}, tmp_path / "b.pt")
    with pytest.raises(Unserialisable, match="shares bytes"):
        adopt(tmp_path / "b.pt", where)
    torch.save({"a": base}, tmp_path / "c.pt")
    adopt(tmp_path / "c.pt", where, step=3)
    with pytest.raises(UsageError, match="has come to step 3"):
        adopt(tmp_path / "c.pt", where, step=3)
    with pytest.raises(UsageError, match="second name"):
        adopt(tmp_path / "c.pt", "memory://adopt")
    assert [one.step for one in tenuto.Repository(where).checkpoints()] == [3]


def test_a_file_that_was_written_over_is_noticed(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(8)}, tmp_path / "c.pt")
    adopt(tmp_path / "c.pt", tmp_path / "repository")
    torch.save({"a": torch.zeros(8)}, tmp_path / "c.pt")
    with pytest.raises(CorruptionError):
        tenuto.load(tmp_path / "repository", step=0)


def test_training_goes_on_from_what_was_adopted(tmp_path: Path) -> None:
    path, state = made(tmp_path)
    tenuto.Repository.adopt(path, tmp_path / "repository")
    model = nn.Linear(200, 300)
    with tenuto.Checkpointer(tmp_path / "repository", {"model": model}, save=tenuto.every(steps=1)) as ckpt:
        for step in ckpt.steps(6):
            assert step == 5 and torch.equal(model.weight, state["model"]["weight"])
    assert [one.step for one in tenuto.Repository(tmp_path / "repository").checkpoints()] == [6, 5]


def test_the_command_adopts_and_copies(tmp_path: Path) -> None:
    path, state = made(tmp_path)
    said = tenuto_command("import", path, "--in-place", "--json")
    (one,) = json.loads(said)["checkpoints"]
    assert one["checkpoint"]["step"] == 5 and tenuto.Repository(path).latest_step() == 5
    for name in ("--dry-run", "--strip=x"):
        with pytest.raises(UsageError, match="--in-place takes a checkpoint as it is"):
            tenuto_command("import", path, "--in-place", name)

    tenuto_command("import", path, tmp_path / "copied", "--from", "dcp", "--step", "5")
    found: Any = tenuto.load(tmp_path / "copied").state
    assert torch.equal(found["model"]["weight"], state["model"]["weight"]) and found["epoch"] == 3
    torch.save(state, tmp_path / "x.pt")
    tenuto_command("import", tmp_path / "x.pt", tmp_path / "copied", "--run", "pt")
    found = tenuto.load(tmp_path / "copied", run="pt").state
    assert torch.equal(found["optimizer"]["state"][1]["exp_avg"], state["optimizer"]["state"][1]["exp_avg"])
    assert (found["numpy"][1] == state["numpy"][1]).all()


def tenuto_command(*words: object) -> str:
    found = subprocess.run(
        [sys.executable, "-m", "tenuto", *map(str, words)], capture_output=True, text=True, check=False, timeout=120
    )
    if found.returncode == 2:
        raise UsageError(found.stderr)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_a_series_is_adopted_again_without_what_was_adopted_before(tmp_path: Path) -> None:
    for step in (1, 2):
        save_file({"a": torch.full((3,), float(step))}, tmp_path / f"step_{step}.safetensors")
    assert [one.step for one in adopt(tmp_path, tmp_path / "r")] == [1, 2]
    save_file({"a": torch.full((3,), 3.0)}, tmp_path / "step_3.safetensors")
    assert [one.step for one in adopt(tmp_path, tmp_path / "r")] == [3]
    assert adopt(tmp_path, tmp_path / "r") == []
    with pytest.raises(UsageError, match="is of step 1, and run 'main' has come to step 3"):
        adopt(tmp_path / "step_1.safetensors", tmp_path / "r")
