"""A directory that is empty though it had a repository, as where a mount is gone: no job starts anew unheard."""

import secrets
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import tenuto
from support.memory_training import live, shared_memory
from support.said import lines_said
from tenuto.errors import RepositoryError
from tenuto.store.memory import MemoryStore
from tenuto.training.checkpointer import Checkpointer
from tenuto.training.fresh_start import RESTARTS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the memory tier lies in shared memory on Linux only")


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in RESTARTS:
        monkeypatch.delenv(name, raising=False)
    with shared_memory():
        yield tmp_path / "ckpts"


def start(where: object, **options: object) -> tuple[int, list[str]]:
    """Trains two steps; the step it began from, and what was said on stderr."""
    with lines_said() as lines:
        state = {"w": np.zeros(4)}
        with Checkpointer(where, state, save=tenuto.on.end(), **options) as ckpt:
            ckpt.restore()
            began = ckpt.step
            for _ in ckpt.steps(began + 2):
                state["w"] += 1
    return began, [line for line in lines if "scratch" in line]


def vanish(where: Path) -> None:
    """Leaves the mount point."""
    shutil.rmtree(where)
    where.mkdir()


def test_a_first_run_and_a_resumed_one_say_nothing(where: Path) -> None:
    assert start(where) == (0, [])
    assert start(where) == (2, [])


def test_where_memory_tells_of_a_repository_that_is_gone_it_is_said(where: Path) -> None:
    assert live(where, kill=7).killed
    vanish(where)
    began, said = start(where)
    assert began == 0
    assert len(said) == 1
    assert f"there is no repository at {where}" in said[0] and "in this machine's memory" in said[0]


@pytest.mark.parametrize("variable", RESTARTS)
def test_a_restarted_job_refuses_to_start_from_scratch_there_and_leaves_nothing(
    where: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert live(where, kill=7).killed
    vanish(where)
    monkeypatch.setenv(variable, "1")
    for _ in range(2):
        with pytest.raises(RepositoryError) as caught:
            start(where)
        assert f"{variable}=1" in caught.value.message
        assert caught.value.hint is not None and "resume_from=None" in caught.value.hint
        assert list(where.iterdir()) == []
    assert start(where, resume_from=None) == (0, []), "asked for"


def test_this_process_had_it(where: Path) -> None:
    assert start(where) == (0, [])
    vanish(where)
    began, said = start(where)
    assert began == 0 and len(said) == 1 and "this process had it open" in said[0]


def test_a_restarted_job_that_finds_no_checkpoint_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(secrets.token_hex(8))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    assert start(store, run="zero") == (0, [])
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    began, said = start(store, run="one")
    assert began == 0 and len(said) == 1 and "SLURM_RESTART_COUNT=3" in said[0]
    assert start(store, run="one") == (2, [])
