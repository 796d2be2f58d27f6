"""`torch.distributed.checkpoint` with Tenuto as its storage, by several ranks."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import tenuto
from support import forked_processes as forked
from tenuto.formats import dcp as dcp_files
from tenuto.maintenance.verify import assert_whole

PROGRAM = Path(__file__).parents[1] / "support" / "dcp_program.py"
PATIENCE_S = 240


def job(tmp_path: Path, *words: str, ranks: int) -> str:
    log = tmp_path / f"log-{len(list(tmp_path.iterdir()))}"
    status = forked.job(PROGRAM, ranks, str(tmp_path / "ours"), *words, log=log, timeout=PATIENCE_S)
    said = forked.told(log, ranks)
    assert not any(status), said
    return said


def saved(tmp_path: Path, name: str) -> Any:
    return json.loads((tmp_path / name).read_text())


@pytest.mark.parametrize(("how", "ranks", "others"), [("save", 2, (1, 4)), ("async", 4, (2,))])
def test_what_some_ranks_save_other_numbers_of_ranks_load(
    tmp_path: Path, how: str, ranks: int, others: tuple[int, ...]
) -> None:
    theirs = str(tmp_path / "theirs")
    job(tmp_path, how, "--out", str(tmp_path / "saved"), "--theirs", theirs, ranks=ranks)
    whole = saved(tmp_path, "saved")
    assert len(whole) > 20
    for other in others:
        job(tmp_path, "load", "--out", str(tmp_path / f"loaded-{other}"), ranks=other)
        assert saved(tmp_path, f"loaded-{other}") == whole

    # it is an ordinary checkpoint, with the parts of each rank
    with tenuto.open(tmp_path / "ours") as opened:
        assert (opened.step, opened.ranks) == (3, ranks)
        assert len(opened["model/0.weight"].parts) == min(ranks, 3)  # 5 rows: 2, 2 and 1
        assert opened.plain("epoch") == 3 and opened.plain("betas") == (0.9, 0.99)
    state: Any = tenuto.load(tmp_path / "ours", step=3).state
    assert type(state["heads"]) is list and torch.equal(state["heads"][1]["b"], torch.arange(3.0) + 3)
    assert state["numpy"][0] == "MT19937" and state["numpy"][1].shape == (624,)

    # and DCP's own directory of the same state says the same, read without its code
    with dcp_files.read(Path(theirs)) as reader:
        for name, value in state["model"].items():
            assert (reader.tree["model"][name].read() == value.numpy()).all()


@pytest.mark.parametrize(
    ("point", "rank", "left"),
    [
        ("save begun", 0, 2),
        pytest.param("pack durable, index not yet", 1, 2, marks=pytest.mark.long),
        pytest.param("packs and indexes durable, manifest not yet", 0, 2, marks=pytest.mark.long),
        ("manifest durable, not yet announced", 0, 3),
    ],
)
def test_killed_inside_a_save_it_leaves_the_step_before_or_the_whole_step(
    tmp_path: Path, point: str, rank: int, left: int
) -> None:
    whole = ["save", "--until", "4", "--out", str(tmp_path / "whole")]
    killed = [*whole, "--kill", point, "--rank", str(rank)]
    log = tmp_path / "log"
    status = forked.job(PROGRAM, 2, str(tmp_path / "ours"), *killed, log=log, timeout=PATIENCE_S)
    assert status[rank] == -signal.SIGKILL, forked.told(log, 2)
    job(tmp_path, "load", "--out", str(tmp_path / "loaded"), ranks=2)
    found = saved(tmp_path, "loaded")
    assert found["/epoch"] == f"int {left}"
    if left == 2:  # of the step in which it was killed it has told nothing
        assert found == saved(tmp_path, "whole-2")
    job(tmp_path, "save", "--step", "9", ranks=1)  # and the next job goes on
    assert_whole(tenuto.Repository(tmp_path / "ours").repo)
    assert tenuto.Repository(tmp_path / "ours").latest_step() == 9


def test_what_cannot_be_saved_is_named_on_every_rank_and_leaves_nothing(tmp_path: Path) -> None:
    said = job(tmp_path, "refused", ranks=2)
    assert said.count("loss: it holds a torch.nn.functional.mse_loss, which only its own code can read") >= 2, said
    assert tenuto.Repository(tmp_path / "ours").checkpoints() == []


def test_a_process_group_of_some_ranks_is_refused_by_name(tmp_path: Path) -> None:
    said = job(tmp_path, "partial", ranks=2)
    assert "1 ranks save with DCP, and 2 would meet to commit" in said
