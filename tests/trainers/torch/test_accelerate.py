"""Trainings with accelerate: prepared loaders as positions, an Accelerator's state, its save_state and load_state."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tenuto
import tenuto.accelerate
from tenuto import every
from tenuto.errors import CheckpointNotFound, TenutoWarning, UsageError
from tenuto.integrations.accelerate.save_state import POINTER, SavedStates
from tenuto.testing.trainer_suite import TrainerSuite

SCRIPT = Path(__file__).with_name("scripts") / "accelerate_loop.py"
PRELOAD = ("torch", "accelerate", "tenuto.accelerate", "tenuto.training.checkpointer")


class TestAccumulation(TrainerSuite):
    """Batches that do not divide into updates: the epoch's end is an update, by the prepared loader's flag."""

    script = SCRIPT
    options = ("--case", "accumulate", "--form", "own")
    preload = PRELOAD
    every = 2
    kills = 1
    certify_steps = (3,)


class Swept(TrainerSuite):
    script = SCRIPT
    preload = PRELOAD


CASES = [
    ("plain", "attach", 13),
    pytest.param("plain", "own", 7, marks=pytest.mark.long),
    pytest.param("accumulate", "attach", 5, marks=pytest.mark.long),
    pytest.param("seedable", "own", 5, marks=pytest.mark.long),
    pytest.param("workers", "own", 5, marks=pytest.mark.long),
    pytest.param("dispatch", "own", 5, marks=pytest.mark.long),
    pytest.param("stream", "own", 5, marks=pytest.mark.long),
    pytest.param("plain", "batches", 5, marks=pytest.mark.long),
    pytest.param("accumulate", "epochs", 3, marks=pytest.mark.long),
    pytest.param("seedable", "attach", 5, marks=pytest.mark.long),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("case", "form", "step"), CASES)
def test_a_prepared_loader_resumes_from_steps_of_an_epoch_and_its_end(
    case: str, form: str, step: int, tmp_path: Path
) -> None:
    suite = type("Case", (Swept,), {"options": ("--case", case, "--form", form), "every": step})()
    plain = suite.run("", tmp_path)
    suite.same(suite.run(tmp_path / "saved", tmp_path, "--every-step"), plain, "uninterrupted")
    steps = sorted(one.step for one in tenuto.Repository(tmp_path / "saved").checkpoints())
    at_ends = {plain["steps"] // 3, steps[-1]}
    for number, found in suite.sweep(tmp_path / "saved", [s for s in steps if s % step == 1 or s in at_ends], tmp_path):
        suite.same(found, plain, f"resumed from step {number}")


@pytest.mark.long
def test_torchdatas_loader_resumes_though_its_first_order_is_another(tmp_path: Path) -> None:
    suite = type("Case", (Swept,), {"options": ("--case", "stateful", "--form", "own")})()
    whole = suite.run(tmp_path / "saved", tmp_path, "--every-step")
    for number, found in suite.sweep(tmp_path / "saved", [1, 7, 10, 25], tmp_path):
        suite.same(found, whole, f"resumed from step {number}")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_ranks_resume(tmp_path: Path) -> None:
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d")
    members: dict[str, Any] = {
        "command": (sys.executable, *launch, "--rdzv-endpoint", "localhost:0"),
        "options": ("--case", "plain", "--form", "own"),
        "preload": (),
    }
    suite = type("Case", (Swept,), members)()
    plain = suite.run("", tmp_path)
    suite.same(suite.run(tmp_path / "saved", tmp_path, "--every-step"), plain, "uninterrupted")
    for number, found in suite.sweep(tmp_path / "saved", [2, 5], tmp_path):
        suite.same(found, plain, f"resumed from step {number}")


# -- save_state and load_state


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    """accelerate keeps what an Accelerator was built with for all that follow in the process. What was attached ends
    before its directory does."""
    yield
    for saved in ATTACHED:
        saved.close()
    ATTACHED.clear()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


ATTACHED: list[SavedStates] = []


def attach(accelerator: Accelerator, where: Path) -> SavedStates:
    ATTACHED.append(tenuto.accelerate.attach(accelerator, where, log="silent"))
    return ATTACHED[-1]


class Trained:
    """A small training with an Accelerator."""

    def __init__(self, directory: Path, attached: bool = True, **options: Any) -> None:
        self.accelerator = Accelerator(cpu=True, **options)
        if attached:
            attach(self.accelerator, directory / "repository")
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        inner: Any = DataLoader(TensorDataset(torch.randn(10, 2)), batch_size=2, shuffle=True)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, inner)

    def train(self, batches: Any) -> list[float]:
        seen = []
        for (x,) in batches:
            self.accelerator.backward(self.model(x).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
            seen.append(float(x.sum()))
        return seen

    def few(self, count: int) -> None:
        batches = iter(self.loader)
        self.train(next(batches) for _ in range(count))
        self.batches = batches


def test_a_directory_that_accelerate_wrote_is_read_by_it(tmp_path: Path) -> None:
    before = Trained(tmp_path, attached=False)
    before.train(before.loader)
    before.accelerator.save_state(str(tmp_path / "old"))
    after = Trained(tmp_path)
    after.accelerator.load_state(str(tmp_path / "old"))
    assert torch.equal(before.model.weight, after.model.weight)


def test_hooks_write_beside_the_file_that_names_the_checkpoint(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    seen: list[Any] = []

    def write(models: Any, weights: list[Any], directory: str) -> None:
        (Path(directory) / "adapter.json").write_text(str(len(weights)))
        weights.pop()

    trained.accelerator.register_save_state_pre_hook(write)
    trained.accelerator.register_load_state_pre_hook(lambda models, directory: seen.append(models.pop()))
    trained.accelerator.save_state(str(tmp_path / "checkpoint-5"))
    assert (tmp_path / "checkpoint-5/adapter.json").read_text() == "1"
    assert json.loads((tmp_path / "checkpoint-5" / POINTER).read_text())["checkpoint"] == "a0001/5"
    saved = trained.model.weight.clone()
    trained.train(trained.loader)
    trained.accelerator.load_state(str(tmp_path / "checkpoint-5"))
    assert seen == [trained.model]
    assert torch.equal(trained.model.weight, saved)


def test_a_directory_appears_once_its_checkpoint_is_committed(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    there: list[bool] = []
    trained.accelerator.register_save_state_pre_hook(
        lambda models, weights, directory: there.append((tmp_path / "checkpoint-1").exists())
    )
    trained.accelerator.save_state(str(tmp_path / "checkpoint-1"))
    assert there == [False]
    (tmp_path / "checkpoint-2").mkdir()  # of a script that makes it itself, killed before its save
    with pytest.raises(CheckpointNotFound, match="a kill has cut that short"):
        trained.accelerator.load_state(str(tmp_path / "checkpoint-2"))


def test_two_saves_behind_one_step_are_two_checkpoints(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    trained.accelerator.save_state(str(tmp_path / "step_20"))
    trained.train(trained.loader)
    trained.accelerator.save_state(str(tmp_path / "epoch_0"))
    saved = trained.model.weight.clone()
    trained.train(trained.loader)
    trained.accelerator.load_state(str(tmp_path / "epoch_0"))
    assert torch.equal(trained.model.weight, saved)


def test_skipping_what_was_restored_returns_the_loader_itself(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    trained.few(2)
    trained.accelerator.save_state(str(tmp_path / "checkpoint-2"))
    rest = trained.train(trained.batches)
    trained.accelerator.load_state(str(tmp_path / "checkpoint-2"))
    continued = trained.accelerator.skip_first_batches(trained.loader, 2)
    assert continued is trained.loader
    assert trained.train(continued) == rest


def test_skipping_another_number_of_batches_warns(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    trained.few(2)
    trained.accelerator.save_state(str(tmp_path / "checkpoint-2"))
    trained.accelerator.load_state(str(tmp_path / "checkpoint-2"))
    with pytest.warns(TenutoWarning, match=r"skip_first_batches\(loader, 3\) .* restored after 2 batches"):
        assert len(trained.train(trained.accelerator.skip_first_batches(trained.loader, 3))) == 2


def test_directories_that_accelerate_names(tmp_path: Path) -> None:
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    trained = Trained(tmp_path, project_config=project)
    for _ in range(3):
        trained.accelerator.save_state()
    assert sorted(one.name for one in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]
    trained.accelerator.load_state()
    trained.accelerator.end_training()
    assert len(tenuto.Repository(tmp_path / "repository").checkpoints()) == 2


def test_the_oldest_directory_stays_until_the_next_is_there(tmp_path: Path) -> None:
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=1)
    trained = Trained(tmp_path, project_config=project)
    there: list[bool] = []
    trained.accelerator.register_save_state_pre_hook(
        lambda models, weights, directory: there.append((tmp_path / "checkpoints" / "checkpoint_0").exists())
    )
    trained.accelerator.save_state()
    trained.accelerator.save_state()
    assert there == [False, True]
    assert [one.name for one in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_1"]


def test_a_directory_of_another_repository_is_refused(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    trained.accelerator.save_state(str(tmp_path / "checkpoint-1"))
    tenuto.save({"x": 1}, tmp_path / "other")
    attach(trained.accelerator, tmp_path / "other")
    with pytest.raises(CheckpointNotFound, match="names a checkpoint of run main in the repository"):
        trained.accelerator.load_state(str(tmp_path / "checkpoint-1"))


@pytest.mark.parametrize("keyword", ["save", "data", "resume_from", "state"])
def test_what_the_script_decides_is_refused_as_a_keyword(keyword: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{keyword}= has no effect here"):
        tenuto.accelerate.attach(Accelerator(cpu=True), tmp_path, **{keyword: None})


def test_nothing_prepared_is_no_state() -> None:
    with pytest.raises(UsageError, match="prepared nothing"):
        tenuto.accelerate.state(Accelerator(cpu=True))


def test_a_loop_that_takes_its_batches_elsewhere_is_not_certified(tmp_path: Path) -> None:
    trained = Trained(tmp_path, attached=False)
    other: Any = DataLoader(TensorDataset(torch.randn(10, 2)), batch_size=2)
    with pytest.warns(TenutoWarning, match="a resume is not exact"):
        with tenuto.Checkpointer(
            tmp_path / "c", tenuto.accelerate.state(trained.accelerator), data=trained.loader, save=every(steps=1)
        ) as ckpt:
            trained.train(other)
            ckpt.step_done()
    with tenuto.Checkpointer(
        tmp_path / "d", tenuto.accelerate.state(trained.accelerator), data=trained.loader, save=every(steps=1)
    ) as ckpt:
        trained.few(2)
        ckpt.step_done()
    repository = tenuto.Repository(tmp_path / "d")
    assert repository.certificate(repository.checkpoints()[0])["exact"] is True


def test_an_inner_loader_reports_to_the_newest_checkpointer(tmp_path: Path) -> None:
    """A notebook builds one after the other on the same loader."""
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    trained = Trained(tmp_path, attached=False, dataloader_config=config)
    seen = []
    for total in (1, 2):
        with tenuto.Checkpointer(tmp_path / "c", {"model": trained.model}, data=trained.loader) as ckpt:
            for _ in ckpt.epochs(total):
                seen.append(len(list(ckpt.batches)))
    assert seen == [5, 5]
