"""Hugging Face's Trainer with Tenuto attached: a resume is what an uninterrupted run is, of models, optimizers, random
states, histories, callbacks and counters.

A process that has imported the frameworks is forked for each training: importing takes ten times as long as one.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).with_name("scripts")))

import hf_trainer
import torch
import transformers
from hf_trainer import Texts, model_of, padded
from transformers import Trainer, TrainerCallback, TrainingArguments

import tenuto
import tenuto.transformers
from tenuto import every, keep
from tenuto.errors import MissingExtra, UsageError

SCRIPT = Path(hf_trainer.__file__)


def run(out: Path, *arguments: str) -> int:
    """Runs the script in a forked child, with its output in `out`.log. Returns its exit status."""
    child = os.fork()
    if child == 0:
        log = os.open(f"{out}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = 1
        try:
            sys.argv = [str(SCRIPT), "--out", str(out), *arguments]
            hf_trainer.main()
            status = 0
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:  # noqa: BLE001 - a child of a test ends here, whatever it was
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def done(out: Path, *arguments: str) -> dict:
    status = run(out, *arguments)
    assert status == 0, Path(f"{out}.log").read_text()[-3000:]
    return json.loads(out.read_text())


def sweep(tmp_path: Path, kind: str, steps: list[int] | None = None) -> None:
    """Resumes from each of `steps`, and compares with the run that was not interrupted, and that with a plain one."""
    where = tmp_path / "whole"
    plain = done(tmp_path / "plain.json", "--kind", kind)
    whole = done(tmp_path / "whole.json", "--kind", kind, "--where", str(where), "--every-step")
    assert whole == plain, "saving changes no number"
    saved = {one.step for one in tenuto.Repository(where).checkpoints()}
    assert saved == set(range(1, plain["history"][-1]["global_step"] + 1))
    for step in sorted(saved) if steps is None else steps:
        copy = tmp_path / f"from-{step}"
        shutil.copytree(where, copy)
        found = done(tmp_path / "again.json", "--kind", kind, "--where", str(copy), "--resume-from", str(step))
        assert found == whole, f"resumed from step {step}"
        shutil.rmtree(copy)


# -- each kind of training; all steps of all kinds run with the long tests ---------------------------------------------

FEW = {
    "best": [6, 12],
    "accumulate": [3, 8],
    "lora": [7],
    "group": [7],
    "streamed_masks": [4, 5],
    "masks": [1, 8],
    "masks_workers": [1, 8],
    "masks_kept": [3, 5, 7],
    "short": [8],
    "counted": [10],
}
"""Kinds, and steps in the middle of an epoch, at its end, behind an evaluation, and at the end."""


@pytest.mark.parametrize("kind", FEW)
def test_a_resume_is_what_an_uninterrupted_run_is(tmp_path: Path, kind: str) -> None:
    sweep(tmp_path, kind, FEW[kind])


@pytest.mark.long
@pytest.mark.parametrize("kind", hf_trainer.KINDS)
def test_resumed_from_each_step(tmp_path: Path, kind: str) -> None:
    sweep(tmp_path, kind)


# -- kills and signals -------------------------------------------------------------------------------------------------


def killed_at(tmp_path: Path, where: Path, step: int, number: int, *more: str) -> subprocess.Popen[str]:
    """Starts the script, and sends it a signal once it has reported the step."""
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "out.json"), "--where", str(where), *more]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith(f"step {step}"):
            running.send_signal(number)
            break
    running.stdout.read()
    running.wait()
    return running


def test_sigterm_saves_the_step_and_leaves_with_its_status(tmp_path: Path) -> None:
    where = tmp_path / "ck"
    running = killed_at(tmp_path, where, 6, signal.SIGTERM)
    assert running.returncode == 128 + signal.SIGTERM, running.stderr
    assert tenuto.Repository(where).latest_step() in (6, 7)
    plain = done(tmp_path / "plain.json")
    assert done(tmp_path / "again.json", "--where", str(where)) == plain


def test_killed_again_and_again(tmp_path: Path) -> None:
    where = tmp_path / "ck"
    plain = done(tmp_path / "plain.json", "--kind", "best")
    for step in (3, 9):
        running = killed_at(tmp_path, where, step, signal.SIGKILL, "--kind", "best", "--every-step")
        assert running.returncode == -signal.SIGKILL
    assert done(tmp_path / "again.json", "--kind", "best", "--where", str(where)) == plain


# -- the trainer's arguments -------------------------------------------------------------------------------------------


def trainer(place: Path, **options) -> Trainer:
    callbacks = options.pop("callbacks", [])
    evaluated = options.pop("eval_dataset", None)
    made = {"max_steps": 6, "per_device_train_batch_size": 4, "use_cpu": True, "report_to": [], "disable_tqdm": True}
    arguments = TrainingArguments(str(place / "out"), **{**made, "save_strategy": "no", **options})
    texts = Texts(20, 1)
    return Trainer(model_of("lm"), arguments, padded, train_dataset=texts, eval_dataset=evaluated, callbacks=callbacks)


def steps_in(where: Path) -> list[int]:
    return sorted(one.step for one in tenuto.Repository(where).checkpoints())


def test_save_steps_and_save_total_limit_are_policies(tmp_path: Path) -> None:
    tried = trainer(tmp_path, save_strategy="steps", save_steps=2, save_total_limit=2)
    tenuto.transformers.attach(tried, tmp_path / "ck")
    tried.train()
    assert steps_in(tmp_path / "ck") == [4, 6]
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_the_best_model_is_kept_and_loaded_at_the_end(tmp_path: Path) -> None:
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": Texts(8, 2), "greater_is_better": True}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_strategy": "steps", "save_steps": 1}
    tried = trainer(tmp_path, **evaluation, **best)
    tenuto.transformers.attach(tried, tmp_path / "ck", keep=keep.latest(1))
    tried.train()
    step = tried.state.best_global_step
    assert step < 6, "the loss falls, and the highest is looked for"
    assert steps_in(tmp_path / "ck") == [step, 6]
    assert tried.state.best_model_checkpoint == f"{tmp_path / 'ck'}@{step}"
    fresh = model_of("lm")
    tenuto.load(tmp_path / "ck", into={"model": fresh}, step=step)
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(tensor, tried.model.state_dict()[name])


class Asking(TrainerCallback):
    def __init__(self) -> None:
        self.found: list[list[str]] = []

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = state.global_step == 3

    def on_save(self, args, state, control, **kwargs):
        place = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.found.append(sorted(path.name for path in place.iterdir()) if place.is_dir() else [])


def test_an_export_is_there_for_on_save(tmp_path: Path) -> None:
    asking = Asking()
    tried = trainer(tmp_path, callbacks=[asking])
    tenuto.transformers.attach(tried, tmp_path / "ck", export="hf", save=every(steps=5))
    tried.train()
    assert len(asking.found) == 1
    assert {"model.safetensors", "config.json", "trainer_state.json"} <= set(asking.found[0])
    assert "optimizer.pt" not in asking.found[0]
    assert steps_in(tmp_path / "ck") == [3, 5]
    again = trainer(tmp_path)  # scripts pass the last directory that they find
    tenuto.transformers.attach(again, tmp_path / "ck")
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert again.state.global_step == 6
    assert steps_in(tmp_path / "ck")[-1] == 6


def test_without_an_export_a_callback_of_ones_own_is_warned_for(tmp_path: Path) -> None:
    tried = trainer(tmp_path, callbacks=[Asking()])
    tenuto.transformers.attach(tried, tmp_path / "ck")
    with pytest.warns(tenuto.TenutoWarning, match=r'Asking.on_save.*export="hf"'):
        tried.train()


def test_resume_from_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="tenuto")
    first = trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    first.train()  # the Trainer's own checkpoint-2
    where = tmp_path / "ck"

    second = trainer(tmp_path, max_steps=4)
    tenuto.transformers.attach(second, where, save=tenuto.on.end())
    second.train(resume_from_checkpoint=True)
    assert "resumes from the Trainer's own" in caplog.text
    assert steps_in(where) == [4]
    assert [entry["step"] for entry in second.state.log_history][-1] == 4

    third = trainer(tmp_path, max_steps=6)
    tenuto.transformers.attach(third, where, save=tenuto.on.end())
    third.train(resume_from_checkpoint=True)
    assert third.state.global_step == 6
    assert steps_in(where) == [4, 6]

    fourth = trainer(tmp_path, max_steps=3)
    tenuto.transformers.attach(fourth, where, save=tenuto.on.end())
    fourth.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert fourth.state.global_step == 3

    fifth = trainer(tmp_path, max_steps=1)
    tenuto.transformers.attach(fifth, where, save=tenuto.on.end())
    fifth.train(resume_from_checkpoint=False)
    assert fifth.state.global_step == 1


@pytest.mark.parametrize("more", [5, 8])
@pytest.mark.parametrize("streamed", [False, True])
def test_training_that_was_over_inside_an_epoch_continues_there_with_more_steps(
    streamed: bool, more: int, tmp_path: Path
) -> None:
    def trained(steps: int, where: Path) -> Trainer:
        made = trainer(tmp_path, max_steps=steps, lr_scheduler_type="constant")
        if streamed:
            made.train_dataset = hf_trainer.Stream(made.train_dataset)
        tenuto.transformers.attach(made, where, save=tenuto.on.end())
        made.train()
        assert made.state.global_step == steps
        return made

    trained(3, tmp_path / "ck")
    resumed, whole = trained(more, tmp_path / "ck"), trained(more, tmp_path / "whole")
    for found, wanted in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(found, wanted)


def test_a_resume_into_epochs_of_another_length_is_not_certified(tmp_path: Path) -> None:
    where = tmp_path / "ck"
    first = trainer(tmp_path, max_steps=3, per_device_train_batch_size=4)
    tenuto.transformers.attach(first, where, save=tenuto.on.end())
    first.train()
    with tenuto.open(where) as opened:
        assert opened.certificate["exact"] is True
    second = trainer(tmp_path, max_steps=8, per_device_train_batch_size=2)
    tenuto.transformers.attach(second, where, save=tenuto.on.end())
    with pytest.warns(tenuto.TenutoWarning, match=r"an epoch has 10 steps, and had 5 .* the resume is not exact"):
        second.train()
    with tenuto.open(where) as opened:
        assert opened.certificate["exact"] is False
        assert any("an epoch has 10 steps" in reason for reason in opened.certificate["reasons"])


class Saving(tenuto.transformers.TenutoMixin, Trainer):
    pass


def test_a_class_of_trainers(tmp_path: Path) -> None:
    plain = trainer(tmp_path)
    made = Saving(plain.model, plain.args, padded, train_dataset=plain.train_dataset)
    made.train()
    assert steps_in(tmp_path / "out" / "tenuto") == [6]


# -- adapters and files ------------------------------------------------------------------------------------------------


def test_of_a_model_with_adapters_only_these_are_saved(tmp_path: Path) -> None:
    done(tmp_path / "a.json", "--kind", "lora", "--where", str(tmp_path / "ck"))
    with tenuto.open(tmp_path / "ck") as opened:
        model = [path for path in opened if path.startswith("model/")]
        assert len(model) == 4
        assert all("lora_" in path for path in model)
        assert len(opened.plain("trainer")["base"]["digest"]) == 32


def test_another_base_is_noticed(tmp_path: Path) -> None:
    done(tmp_path / "a.json", "--kind", "lora", "--where", str(tmp_path / "ck"), "--arguments", '{"max_steps": 2}')
    model = model_of("lora")
    with torch.no_grad():
        model.get_base_model().transformer.wpe.weight.add_(1)
    given = TrainingArguments(str(tmp_path), max_steps=4, use_cpu=True, report_to=[], per_device_train_batch_size=4)
    tried = Trainer(model, given, padded, train_dataset=Texts(20, 1))
    tenuto.transformers.attach(tried, tmp_path / "ck")
    with pytest.warns(tenuto.TenutoWarning, match="the frozen model below the adapters is not the one"):
        tried.train()


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a Trainer of transformers"):
        tenuto.transformers.attach(object(), tmp_path)
    tried = trainer(tmp_path)
    with pytest.raises(UsageError, match=r"attach takes no memroy="):
        tenuto.transformers.attach(tried, tmp_path, memroy=every(steps=1))
    tenuto.transformers.attach(tried, tmp_path / "ck")
    with pytest.raises(UsageError, match="attached to this Trainer already"):
        tenuto.transformers.attach(tried, tmp_path / "ck")
    with pytest.raises(UsageError, match="hyperparameter_search"):
        tried.train(trial={"learning_rate": 1})


def test_an_untested_version_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from tenuto.integrations.transformers import names

    monkeypatch.setattr(transformers, "__version__", "9.1.0")
    monkeypatch.setattr(names, "_checked", [])
    with pytest.warns(tenuto.TenutoWarning, match="transformers 9.1.0 is not one of the versions"):
        names.package()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names.package()


def test_a_trainer_without_a_method_that_is_taken_over_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = trainer(tmp_path)
    monkeypatch.setattr(tried, "_run_epoch", None)
    with pytest.raises(UsageError, match="has no _run_epoch"):
        tenuto.transformers.attach(tried, tmp_path)


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from tenuto.integrations.transformers import names

    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(MissingExtra, match=r"pip install '\.\[transformers\]'"):
        names.package()
