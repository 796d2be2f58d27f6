"""TenutoCheckpoint in Lightning's Trainer: every resume ends where the uninterrupted training does."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import shutil
import signal
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

import tenuto
import tenuto.lightning
from tenuto.errors import CheckpointNotFound, PolicyConflict, UsageError
from tenuto.testing.trainer_suite import TrainerSuite

pytest.importorskip("lightning")

SCRIPTS = Path(__file__).with_name("scripts")
SCRIPT = SCRIPTS / "lightning_train.py"
_spec = importlib.util.spec_from_file_location("lightning_train", SCRIPT)
assert _spec is not None and _spec.loader is not None
trainings = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(trainings)


PRELOAD = ("torch._dynamo", "lightning.pytorch", "tenuto.lightning", "tenuto.training.checkpointer")


class TestTrainer(TrainerSuite):
    script = SCRIPT
    options = ("--case", "mnist")
    preload = PRELOAD
    kills = 1
    certify_steps = (5,)  # the last step of an epoch


class TestEma(TrainerSuite):
    script = SCRIPT
    options = ("--case", "ema")
    preload = PRELOAD
    every = 100
    kills = 1
    certify_steps = ()


@pytest.mark.long
class TestTwoRanks(TrainerSuite):
    """DDP, with buffers that differ between the ranks."""

    script = SCRIPT
    options = ("--case", "ddp")
    every = 4
    kills = 1
    certify_steps = ()


@pytest.mark.long
class TestShardedOverTwoRanks(TrainerSuite):
    """FSDP2, by Lightning's ModelParallelStrategy."""

    script = SCRIPT
    options = ("--case", "sharded")
    every = 4
    kills = 1
    certify_steps = ()


def train(case: str, where: Path | str = "", **more: Any) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()):
        found, _ = trainings.train(case, str(where), **more)
    return dict(json.loads(json.dumps(found, default=str)))


def fit(case: str, where: Path | str = "", **more: Any) -> Any:
    """Trains, and returns the Trainer."""
    with contextlib.redirect_stdout(io.StringIO()):
        return trainings.train(case, str(where), **more)[1]


def differences(found: dict[str, Any], wanted: dict[str, Any], *, over: bool) -> list[str]:
    """`over`: the restored fit was over already. Then only what it had reached counts."""
    if over:
        for one in (found, wanted):
            one["digest"].pop("torch")  # `on_train_start` and `on_train_end` come once more
    suite = TrainerSuite()
    return suite.differences(found, wanted)


SWEPT = [case for case in trainings.CASES if case not in ("mnist", "swa", "hparams", "ddp", "sharded")]


@pytest.mark.parametrize("case", SWEPT)
def test_it_resumes_from_each_step(case: str, tmp_path: Path) -> None:
    plain = train(case)
    assert differences(train(case, tmp_path / "every", every_step=True), plain, over=False) == []
    steps = sorted(one.step for one in tenuto.Repository(tmp_path / "every").checkpoints())
    wrong = {}
    for step in steps:
        copied = shutil.copytree(tmp_path / "every", tmp_path / "from")
        found = train(case, copied, resume_from=step)
        if differing := differences(found, json.loads(json.dumps(plain)), over=step == steps[-1]):
            wrong[step] = differing[:3]
        shutil.rmtree(copied)
    assert not wrong


# -- how a fit ends before its end


def forked(train: Any) -> int:
    """Returns the exit status of a process that trains."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train()
            code = 0
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 1
        except BaseException:  # noqa: BLE001 - told by the exit status
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


PHASES = {
    "on_train_start": None,  # no step is done: there is nothing to save
    "on_train_batch_start": 7,
    "on_before_optimizer_step": 7,
    "on_train_batch_end": 6,
    "on_validation_start": 7,
    "on_validation_batch_end": 7,
    "on_validation_end": 7,
    "on_train_epoch_end": 10,
    "on_train_epoch_start": 11,
}


@pytest.mark.parametrize("phase", PHASES)
def test_sigterm_in_each_phase_saves_the_step_and_leaves(phase: str, tmp_path: Path) -> None:
    at = 0 if PHASES[phase] is None else 6
    asked = forked(lambda: train("plateau", tmp_path, callbacks=[trainings.Ask(phase, at)]))
    assert asked == (128 + signal.SIGTERM if PHASES[phase] is not None else -signal.SIGTERM)
    if PHASES[phase] is not None:
        with tenuto.open(tmp_path) as opened:
            assert opened.step == PHASES[phase]
    assert differences(train("plateau", tmp_path), train("plateau"), over=False) == []


def test_an_exception_leaves_what_was_saved(tmp_path: Path) -> None:
    class Broken(trainings.Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == 6:
                raise ValueError("broken")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="broken"):
        train("mnist", tmp_path, more_model=Broken)
    with tenuto.open(tmp_path) as opened:
        assert opened.step == 4  # the last of every(steps=4); the fit did not end well
    assert differences(train("mnist", tmp_path), train("mnist"), over=False) == []


# -- what ModelCheckpoint has


def test_it_keeps_the_best_and_tells_their_path(tmp_path: Path) -> None:
    options = {"monitor": "val_loss", "save_top_k": 2, "save": None, "keep": None}
    trainer = fit("mnist", tmp_path, options=options)
    callback = trainer.checkpoint_callback
    kept = {one.step: tenuto.open(tmp_path, step=one.step).metrics["val_loss"] for one in _saved(tmp_path)}
    best = min(kept, key=kept.__getitem__)
    assert callback.best_model_path == f"tenuto://{tmp_path}@{best}"
    assert callback.best_model_score.item() == pytest.approx(kept[best])
    assert callback.last_model_path == f"tenuto://{tmp_path}@{max(kept)}"

    loaded = trainings.Net.load_from_checkpoint(callback.best_model_path, case="mnist")
    expected = tenuto.load(tmp_path, step=best).state["model"]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())

    model = trainings.Net("mnist")
    trainer.validate(model, ckpt_path="best", verbose=False)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_a_path_of_no_checkpoint_says_so(tmp_path: Path) -> None:
    fit("hparams", tmp_path)
    with pytest.raises(CheckpointNotFound, match="no checkpoint of step 77"):
        trainings.Net.load_from_checkpoint(f"tenuto://{tmp_path}@77", case="hparams")
    with pytest.raises(UsageError, match="not a path of a checkpoint"):
        trainings.Net.load_from_checkpoint(f"tenuto://{tmp_path}", case="hparams")


def test_every_n_train_steps_and_every_n_epochs(tmp_path: Path) -> None:
    options = {"save": None, "every_n_train_steps": 4, "every_n_epochs": 2}
    fit("mnist", tmp_path, options=options)
    assert [one.step for one in _saved(tmp_path)] == [4, 8, 10, 12, 15]
    with pytest.raises(PolicyConflict):
        tenuto.lightning.TenutoCheckpoint(tmp_path, save=tenuto.every(steps=1), every_n_epochs=1)
    with pytest.raises(UsageError, match="no argument 'dirpath'"):
        tenuto.lightning.TenutoCheckpoint(tmp_path, dirpath="x")


def test_a_ckpt_path_that_is_given_is_obeyed(tmp_path: Path) -> None:
    ends = []
    for where in ("", str(tmp_path / "runs")):
        trainer = fit("mnist", max_epochs=1)
        trainer.save_checkpoint(tmp_path / "given.ckpt")
        if where:
            fit("mnist", where, max_epochs=2)
        ends.append(train("mnist", where, ckpt_path=str(tmp_path / "given.ckpt"), weights_only=False))
    assert ends[0]["history"]["counters"] == ends[1]["history"]["counters"]
    assert ends[0]["digest"] == ends[1]["digest"]


def test_hparams_that_cannot_be_saved_are_named_once(tmp_path: Path) -> None:
    with pytest.warns(tenuto.TenutoWarning) as told:
        fit("hparams", tmp_path)
    assert len([one for one in told if "activation (a type)" in str(one.message)]) == 1
    with tenuto.open(tmp_path) as opened:
        assert opened.plain("lightning/values/hyper_parameters") == {"width": 5}


def test_what_lightning_does_not_restore_is_named(tmp_path: Path) -> None:
    with pytest.warns(tenuto.TenutoWarning, match="StochasticWeightAveraging"):
        fit("swa", tmp_path / "swa")
    with tenuto.open(tmp_path / "swa") as opened:
        assert opened.certificate["exact"] is False
    fit("two_optimizers", tmp_path / "manual")
    with tenuto.open(tmp_path / "manual") as opened:
        assert opened.certificate["exact"] is True
        assert any("manual optimization" in one for one in opened.certificate["caveats"])


def test_a_tuner_trains_without_it(tmp_path: Path) -> None:
    tuning = importlib.import_module(f"{trainings.PACKAGE.__name__}.tuner")
    callback = tenuto.lightning.TenutoCheckpoint(tmp_path)
    trainer = trainings.PACKAGE.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, callbacks=[callback]
    )
    model = trainings.Net("mnist")
    tuning.Tuner(trainer).lr_find(model, num_training=5, attr_name="case_lr", update_attr=False)
    assert not (tmp_path / "tenuto.json").exists()
    trainer.fit(model)
    assert [one.step for one in _saved(tmp_path)] == [5]


def test_the_plug_in_serves_lightnings_own_callback(tmp_path: Path) -> None:
    ends = []
    for plugin in (None, tenuto.lightning.TenutoCheckpointIO()):
        place = tmp_path / str(plugin is None)
        own = trainings.CALLBACKS.ModelCheckpoint(place, monitor="val_loss", save_top_k=2, save_last=True)
        more = {"enable_checkpointing": True, "plugins": [plugin] if plugin else []}
        trainer = fit("mnist", callbacks=[own], max_epochs=2, **more)
        assert len(own.best_k_models) == 2
        ends.append(train("mnist", callbacks=[own], ckpt_path=own.last_model_path, weights_only=False, **more))
        trainer.validate(trainings.Net("mnist"), ckpt_path=own.best_model_path, verbose=False, weights_only=False)
        if plugin:
            assert (Path(own.best_model_path) / "tenuto.json").exists()
            assert sum(one.is_dir() for one in place.iterdir()) == 3
    assert ends[0]["digest"] == ends[1]["digest"]


@pytest.mark.parametrize("last", [True, "link"])
def test_a_path_that_is_saved_again_keeps_one_checkpoint(tmp_path: Path, last: Any) -> None:
    """As a file of torch's would; a link to the last one is loaded through, replaced and removed like a file."""
    own = trainings.CALLBACKS.ModelCheckpoint(tmp_path, save_top_k=1, save_last=last, every_n_train_steps=1)
    own.FILE_EXTENSION = ""
    more = {"enable_checkpointing": True, "plugins": [tenuto.lightning.TenutoCheckpointIO()]}
    trainer = fit("mnist", callbacks=[own], max_epochs=2, **more)
    paths = {Path(own.best_model_path), Path(own.last_model_path)}
    assert {one.name for one in tmp_path.iterdir()} == {one.name for one in paths} and len(paths) == 2
    for path in paths:
        assert len(_saved(path)) == 1
        loaded = tenuto.load(path).state["checkpoint"]
        assert loaded["global_step"] == trainer.global_step == 10
    assert Path(own.last_model_path).is_symlink() is (last == "link")
    resumed = fit("mnist", callbacks=[own], max_epochs=3, ckpt_path=own.last_model_path, weights_only=False, **more)
    assert resumed.global_step == 15
    trainer.strategy.checkpoint_io.remove_checkpoint(own.last_model_path)
    assert not Path(own.last_model_path).exists() and Path(own.best_model_path).is_dir()


@pytest.mark.parametrize("saved_by", ["plug-in", "callback"])
def test_no_thread_is_left_behind_a_fit(tmp_path: Path, saved_by: str) -> None:
    own = trainings.CALLBACKS.ModelCheckpoint(tmp_path / "plug-in", save_top_k=-1, every_n_train_steps=2)
    plugged = {"callbacks": [own], "enable_checkpointing": True, "plugins": [tenuto.lightning.TenutoCheckpointIO()]}
    before = set(threading.enumerate())
    if saved_by == "plug-in":
        fit("mnist", max_epochs=1, **plugged)
    else:
        fit("mnist", tmp_path / "callback", max_epochs=1)
    assert any((tmp_path / saved_by).iterdir())
    assert not [one.name for one in set(threading.enumerate()) - before]


def _saved(where: Path) -> list[Any]:
    return sorted(tenuto.Repository(where).checkpoints(), key=lambda one: one.step)
