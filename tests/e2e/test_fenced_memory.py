"""Killed while a state is being copied beside training: the next process goes on from the state before, bit for bit."""

import sys
from pathlib import Path

import pytest
import torch

import tenuto
from support.fenced_training import Model, Told, snapshot, spying, stepping
from support.memory_training import Kill, fork, shared_memory
from tenuto import every
from tenuto.crashpoints import armed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the memory tier lies in shared memory on Linux only")

STEPS = 9


def train(where: Path, states: Path, steps: int = STEPS) -> None:
    """What the state is at each step goes to `states`; where it began, and from what, to `began`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    options = {"save": every(steps=100), "memory": every(steps=1), "capture": "fenced"}
    with spying(Told()), tenuto.Checkpointer(where, state, **options) as ckpt:
        found = ckpt.restore()
        body = stepping(model, optimizer)
        (states / "began").write_text(f"{ckpt.step} {found.source if found is not None else ''}")
        torch.save(snapshot(state), states / f"from-{ckpt.step}")
        for step in ckpt.steps(steps):
            body(step)
            torch.save(snapshot(state), states / str(step + 1))
            ckpt._training.saving.memory._saver.join(30)


@pytest.mark.parametrize(
    ("at", "count", "left"),
    [
        ("image being copied beside training", 1, 3),
        pytest.param("image being copied beside training", 5, 3, marks=pytest.mark.long),
        ("memory image captured, not sealed", 5, 4),
        pytest.param("memory image sealed", 5, 5, marks=pytest.mark.long),
    ],
)
def test_the_state_before_is_gone_on_from(tmp_path: Path, at: str, count: int, left: int) -> None:
    """The first state of which anything is copied late is that of step 4, after the probation."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()

    def cut_off() -> None:
        with armed(at, Kill(count)):
            train(tmp_path / "b", killed)

    with shared_memory():
        assert fork(lambda: train(tmp_path / "a", whole)) == 0
        assert fork(cut_off) == -9
        assert fork(lambda: train(tmp_path / "b", killed)) == 0
    began = (killed / "began").read_text()
    assert began.startswith(f"{left} from memory, step {left}")
    for name in (str(left), str(STEPS)):
        one = torch.load(whole / name)
        other = torch.load(killed / (f"from-{left}" if name == str(left) else name))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[path], other[path]) for path in one), f"step {name}"
