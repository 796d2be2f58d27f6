"""Directories of another repository, and steps in each other's place, as a person's copying leaves them: everybody's
run is called main, and everybody's first attempt a0001."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import tenuto
from support.said import said
from tenuto.cli import main
from tenuto.errors import NothingRestorable

RUN, ATTEMPT = "runs/main", "runs/main/a0001"
STEPS = [f"{ATTEMPT}/step-{step:08d}" for step in (10, 20, 30)]


def train(where: Path, start: float, steps: int) -> float:
    """Returns what the last step had made of the state."""
    state = {"w": np.full(4, start)}
    with tenuto.Checkpointer(where, state, save=tenuto.every(steps=10), keep=tenuto.keep.latest(9)) as ckpt:
        for _ in ckpt.steps(steps):
            state["w"] += 1
    return float(state["w"][0])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("two")
    train(root / "ours", 0.0, 30)
    train(root / "theirs", 1000.0, 30)
    return root / "ours", root / "theirs"


@pytest.fixture
def ours(made: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[0], tmp_path / "ours"))


def laid(*directories: str, over: bool) -> Callable[[Path, Path], None]:
    def act(ours: Path, theirs: Path) -> None:
        for directory in directories:
            if not over:
                shutil.rmtree(ours / directory)
            shutil.copytree(theirs / directory, ours / directory, dirs_exist_ok=True)

    return act


def swap(ours: Path, theirs: Path) -> None:
    shutil.move(ours / STEPS[1], ours / "aside")
    shutil.move(ours / STEPS[2], ours / STEPS[1])
    shutil.move(ours / "aside", ours / STEPS[2])


def verified(where: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        main(["verify", str(where)])
    code = caught.value.code or 0
    assert isinstance(code, int)
    return code, capsys.readouterr().out


@pytest.mark.parametrize("over", [True, False], ids=["over ours", "in place of ours"])
@pytest.mark.parametrize("directory", [RUN, ATTEMPT])
def test_a_line_of_another_repository_is_never_taken_for_ones_own(
    ours: Path, made: tuple[Path, Path], directory: str, over: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    laid(directory, over=over)(ours, made[1])
    before = {path: path.read_bytes() for path in ours.rglob("*") if path.is_file()}
    for act in (lambda: tenuto.load(ours), lambda: train(ours, 0.0, 40)):
        with said("passed over"), pytest.raises(NothingRestorable, match="belongs to"):
            act()
    code, told = verified(ours, capsys)
    told = " ".join(told.split())  # lines wrap, where depends on how long the place's name is
    assert code == 12 and "0 checkpoints" in told and "belongs to repository" in told
    assert {path: path.read_bytes() for path in ours.rglob("*") if path.is_file()} == before


def test_a_step_of_another_repository_is_passed_over_and_said(
    ours: Path, made: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    laid(STEPS[2], over=False)(ours, made[1])
    with said("main/a0001/30 is passed over: .* belongs to repository"):
        found = tenuto.load(ours)
    assert found.step == 20 and found.state["w"][0] == 20.0
    assert [id.step for id, _ in found.skipped] == [30]
    code, told = verified(ours, capsys)
    assert code == 12 and "2 checkpoints can be restored" in told and "swapped" not in told
    with said("passed over"):
        assert train(ours, 0.0, 40) == 40.0, "training starts from its own"
    assert sorted(path.name for path in (ours / STEPS[2]).iterdir()) == sorted(
        path.name for path in (made[1] / STEPS[2]).iterdir()
    ), "retention and the claim leave it alone"


def test_two_steps_that_changed_places_are_neither(ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swap(ours, ours)
    with said("passed over: .* is a copy of"):
        found = tenuto.load(ours)
    assert found.step == 10 and found.state["w"][0] == 10.0
    code, told = verified(ours, capsys)
    assert code == 12 and told.count("were the two swapped?") == 2
    swap(ours, ours)
    assert tenuto.load(ours).step == 30
    assert verified(ours, capsys)[0] == 0
