"""Puts a Checkpointer into a Trainer.

A callback could not do it: where training begins, and what is skipped, is computed before the first callback is called.
So methods of the one Trainer object are replaced by those of an `Attachment`, each of which is given the original;
subclasses of Trainer, such as TRL's, keep what they have of their own.

The Trainer learns from a directory with `trainer_state.json` alone where it is. Everything else is restored by the
Checkpointer once model, optimizer and scheduler exist, and the random state where the Trainer restores it.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from torch import nn

from tenuto import log_lines
from tenuto.api.save_load import load
from tenuto.errors import CheckpointNotFound, UsageError, did_you_mean
from tenuto.events import warn
from tenuto.integrations.transformers import names, policies, progress, weights
from tenuto.integrations.transformers.order import BatchOrder
from tenuto.policy.keep import KeepPolicy
from tenuto.policy.save import SavePolicy
from tenuto.state.declarations import first_rank, late, per_rank, replicated
from tenuto.state.position.positions import length
from tenuto.store.contract import Where
from tenuto.training.checkpointer import Checkpointer

Export = Literal["hf"]
EXPORTED: Final = "tenuto_export.json"
"""The file in an exported checkpoint-N that says what it was exported from."""
STATE: Final = "trainer_state.json"


class Attachment:
    """What a Trainer saves by, and resumes from.

    checkpointer: the Checkpointer of the training under way, or of the last one.
    """

    def __init__(
        self,
        trainer: Any,
        where: Where,
        *,
        save: SavePolicy | None,
        keep: KeepPolicy | None,
        export: Export | None,
        options: Mapping[str, Any],
    ) -> None:
        names.check(trainer)
        self.trainer = trainer
        self.where = where
        self.checkpointer: Checkpointer | None = None
        self._options = {**options, "save": save, "keep": keep}
        self._export = export == "hf"
        self._asked = policies.TrainerAsks()
        self._order = BatchOrder()
        self._progress = progress.TrainerProgress(trainer)
        self._rank = progress.RankProgress(trainer)
        self._state: dict[str, Any] = {}
        self._found: Mapping[str, Any] | None = None
        """What the checkpoint that is resumed from says of the Trainer."""
        self._begun = False
        self._again = False
        """Whether the epoch begins again, whatever the checkpoint says."""
        self._earlier_s = 0.0
        """Seconds of training in the processes before this one."""
        self._updates_per_epoch = 1
        self._batches_per_epoch = 0
        self._has_length = True
        """Whether these are the epoch's own: of data without a length the Trainer takes max_steps for them."""
        self._reported = 0
        """The last step that the Trainer has reported."""
        self._saved_at = -1
        for name in names.METHODS:
            setattr(trainer, name, partial(getattr(self, name.lstrip("_")), getattr(trainer, name)))

    @property
    def run(self) -> str:
        return str(self._options.get("run", "main"))

    # -- beginning, and ending -----------------------------------------------------------------------------------------

    def train(
        self,
        original: Callable[..., Any],
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        self._refuse(trial)
        start, foreign = self._start(resume_from_checkpoint)
        with self._opened(start) as checkpointer:
            self._found = self._peeked(checkpointer)
            if self._found is None and resume_from_checkpoint is True:
                foreign = self._of_trainer()
            self._warn_of_callbacks()
            with self._place(foreign) as place, _replaced(self.trainer.args, self._not_again):
                return original(place, trial, *args, **options)

    def _refuse(self, trial: Any) -> None:
        if trial is not None:
            raise UsageError(
                "hyperparameter_search trains many runs, and a Checkpointer one",
                subject="trial",
                hint="search with a Trainer that nothing is attached to, then attach to the one that trains the best",
            )
        if self.trainer.is_deepspeed_enabled:
            raise UsageError(
                "DeepSpeed keeps the training's state in an engine of its own, which attach does not save",
                subject="trainer",
                hint="tenuto.deepspeed saves an engine; without attach the Trainer saves by DeepSpeed",
            )

    def _start(self, asked: Any) -> tuple[Any, Any]:
        """Returns what the Checkpointer resumes from, and the checkpoint of somebody else that the Trainer resumes
        from."""
        default = self._options.get("resume_from", "latest")
        if asked is None or asked is True:
            return default, None
        if asked is False:
            return None, None
        path = Path(asked)
        where, _, step = os.fspath(asked).rpartition("@")
        if where == self.url and step.isdigit():
            return int(step), None
        if os.fspath(path) == self.url.rstrip("/"):
            return "latest", None
        if (path / "tenuto.json").is_file():
            raise UsageError(
                f"resume_from_checkpoint={asked!r} is another repository than {self.url}",
                subject="resume_from_checkpoint",
                hint="attach the trainer to it, or give resume_from= a tag or a step",
            )
        exported = path / EXPORTED
        if exported.is_file():  # it has no optimizer: what it was exported from has
            step = int(json.loads(exported.read_text())["step"])
            return ("latest" if step >= max(_numbers(path.parent), default=0) else step), None
        return None, os.fspath(asked)

    def _opened(self, start: Any) -> Checkpointer:
        trainer, options = self.trainer, dict(self._options)
        self._state = dict.fromkeys(("model", "optimizer", "scheduler", "trainer", "rank", weights.ENTRY), late())
        if trainer.accelerator.scaler is not None:
            self._state["scaler"] = trainer.accelerator.scaler
        options["save"] = policies.saving(trainer.args, self._asked, options["save"])
        options["keep"] = policies.keeping(trainer.args, options["keep"])
        options["resume_from"] = start
        self._asked.step, self._begun, self._order.reasons = -1, False, ()
        self.checkpointer = Checkpointer(self.where, self._state, data=self._order, **options)
        return self.checkpointer

    @property
    def url(self) -> str:
        return os.fspath(self.where) if isinstance(self.where, str | os.PathLike) else str(self.where.url)

    def _peeked(self, checkpointer: Checkpointer) -> Mapping[str, Any] | None:
        opened = checkpointer.peek()
        if opened is None:
            return None
        if not any(path.partition("/")[0] == "trainer" for path in opened.plain_paths()):
            raise UsageError(
                f"{opened.id} in {self.url} has no state of a Trainer as Tenuto saves it, as one that was imported",
                subject=str(opened.id),
                hint="attach the Trainer to an empty place, and resume once from its own directory: "
                "trainer.train(resume_from_checkpoint='…/checkpoint-N'); from then on Tenuto resumes",
            )
        found = dict(opened.plain("trainer"))
        found["state"] = progress.read_state(found["state"], str(opened.id))
        return found

    def _of_trainer(self) -> str | None:
        """Returns the last checkpoint that a Trainer has left in its output_dir, which resume_from_checkpoint=True
        means where there is none here."""
        from transformers.trainer_utils import get_last_checkpoint

        output = self.trainer.args.output_dir
        last = get_last_checkpoint(output) if os.path.isdir(output) else None
        last = None if last is None or (Path(last) / EXPORTED).exists() else last
        resumed = f"training resumes from the Trainer's own {last}" if last else "training begins at its beginning"
        log_lines.log(logging.INFO, f"there is no checkpoint in {self.url} yet: {resumed}")
        return last

    @contextmanager
    def _place(self, foreign: str | None) -> Iterator[str | None]:
        """Provides the directory that the Trainer resumes from."""
        if self._found is None:
            yield foreign
            return
        with tempfile.TemporaryDirectory(prefix="tenuto-") as place:
            state = {**self._found["state"], "best_model_checkpoint": None}  # it would be looked for as a directory
            (Path(place) / STATE).write_text(json.dumps(state))
            yield place

    @property
    def _not_again(self) -> Mapping[str, Any]:
        return {} if self._found is None else {"eval_on_start": False}

    def _warn_of_callbacks(self) -> None:
        if self._exports:
            return
        for callback in self.trainer.callback_handler.callbacks:
            kind = type(callback)
            if not kind.__module__.startswith("transformers.") and "on_save" in vars(kind):
                warn(
                    f"{kind.__name__}.on_save is called, and finds no directory checkpoint-N: Tenuto saves elsewhere. "
                    'attach(…, export="hf") writes one at each save of the Trainer'
                )

    # -- the Trainer's own methods -------------------------------------------------------------------------------------

    def init_training_state(
        self, original: Callable[..., Any], max_steps: int, updates_per_epoch: int, *args: Any, **options: Any
    ) -> Any:
        counted = original(max_steps, updates_per_epoch, *args, **options)
        trainer = self.trainer
        self._updates_per_epoch = updates_per_epoch
        self._again = False
        if self._found is None:
            return counted
        state = self._found["state"]
        trainer.state.best_model_checkpoint = state.get("best_model_checkpoint")
        progress.restore_callbacks(trainer, state.get("stateful_callbacks") or {})
        position = self._found["position"]
        if trainer.args.ignore_data_skip:
            self._not_exact("ignore_data_skip begins the epoch again")
            self._again = True
            return counted
        if position["ended"]:
            return position["epoch"] + 1, 0
        updates = position["updates"]
        if position["per_epoch"] not in (None, updates_per_epoch):
            updates = updates * updates_per_epoch // position["per_epoch"]
            self._not_exact(
                f"an epoch has {updates_per_epoch} steps, and had {position['per_epoch']} when the checkpoint was "
                f"saved: it continues after {updates} of them"
            )
        return position["epoch"], updates * trainer.args.gradient_accumulation_steps

    def _not_exact(self, why: str) -> None:
        self._order.reasons = (*self._order.reasons, why)
        warn(f"{why}: the resume is not exact")

    def prepare_for_training(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        prepared = original(*args, **options)
        trainer, checkpointer = self.trainer, self._checkpointer
        if self._begun and checkpointer.step:
            raise UsageError(
                f"training started again after step {checkpointer.step}, as auto_find_batch_size has it",
                subject="auto_find_batch_size",
                hint="find the batch size in a short training that nothing is attached to, and set it",
            )
        self._begun = False
        model: nn.Module = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
        if weights.is_peft(model):
            found = weights.trained(model)
            self._state["model"] = replicated(found)
            self._progress.base = weights.base_of(model, found)
            self._compare_base(self._progress.base)
        else:
            self._state["model"] = trainer.model_wrapped
        self._state["optimizer"] = trainer.optimizer
        self._state["scheduler"] = trainer.lr_scheduler
        self._progress.reset()
        self._state["trainer"], self._state["rank"] = first_rank(self._progress), per_rank(self._rank)
        self._state[weights.ENTRY] = first_rank(weights.ModelFiles.of(trainer, model))
        checkpointer.restore()
        if self._again:
            self._order.forget()
        checkpointer.prepare()
        return prepared

    def _compare_base(self, base: Mapping[str, Any]) -> None:
        saved = None if self._found is None else self._found.get("base")
        if saved is not None and saved["digest"] != base["digest"]:
            self._not_exact(
                f"the frozen model below the adapters is not the one that they were trained on ({saved['name']}, "
                f"digest {saved['digest']}; here {base['name']}, {base['digest']})"
            )

    def run_epoch(self, original: Callable[..., Any], **at: Any) -> Any:
        first = self._begin()
        if first and self._is_over():
            return None
        after = 0
        if first and at["resume_from_checkpoint"] is not None and at["epoch"] == at["epochs_trained"]:
            after = at["steps_trained_in_current_epoch"]
        self._batches_per_epoch = at["steps_in_epoch"]
        self._has_length = length(at["train_dataloader"]) is not None
        self._order.begin(at["train_dataloader"], at["epoch"], after, self._checkpointer.restore_random_state)
        return original(**at)

    def _begin(self) -> bool:
        """Takes over what the Trainer has reset, once, before anything is trained."""
        if self._begun:
            return False
        self._begun = True
        self._earlier_s = self._progress.begin()
        self._rank.begin()
        self._reported = self.trainer.state.global_step
        return True

    def _is_over(self) -> bool:
        """Returns whether training had come to its end when the checkpoint was saved: the Trainer would go on for a
        step."""
        if self._found is None:
            return False
        state, before = self.trainer.state, self._found["state"]
        control = (before.get("stateful_callbacks") or {}).get("TrainerControl", {}).get("args", {})
        stopped = bool(control.get("should_training_stop")) and state.max_steps <= before["max_steps"]
        if state.global_step >= state.max_steps or stopped:
            why = "" if state.global_step >= state.max_steps else ": a callback had stopped it"
            log_lines.log(logging.INFO, f"training was over at step {state.global_step}{why}; nothing is left to do")
            self.trainer.control.should_training_stop = True
            return True
        return False

    def get_batch_samples(self, original: Callable[..., Any], iterator: Any, *args: Any, **options: Any) -> Any:
        found = original(iterator if self._order.batches is None else self._order.batches, *args, **options)
        self._order.delivered += len(found[0])
        return found

    def maybe_log_save_evaluate(self, original: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Completes the step. At the end of an epoch the Trainer calls this twice, and only then all is done."""
        original(*args, **options)
        step, control, order = self.trainer.state.global_step, self.trainer.control, self._order
        if step > self._reported:
            self._reported = step
            ends = control.should_epoch_stop or control.should_training_stop
            if not ends and order.delivered < self._batches_per_epoch:
                self._complete(step, ended=False)
        elif self._checkpointer.step < step:
            self._complete(step, ended=not self._is_cut)
        else:  # an epoch of unknown length: its last step is completed already
            asked, self._asked.step = self._asked.step == step, -1
            self._note_position(ended=True)
            if asked and self._saved_at != step:
                self._checkpointer.save()

    def _complete(self, step: int, *, ended: bool) -> None:
        trainer = self.trainer
        metrics = progress.metrics_of(trainer, step)
        if metrics.get(progress.BEST) and trainer.args.load_best_model_at_end:
            self._ask(step)
        self._note_position(ended=ended)
        self._saved_at = self._asked.step
        self._checkpointer.step_done(step, epoch=self._order.epoch + ended, epoch_ended=ended, **metrics)
        self._asked.step = -1

    @property
    def _is_cut(self) -> bool:
        """Returns whether training stops inside an epoch: with more steps it continues there."""
        control = self.trainer.control
        if control.should_epoch_stop or not control.should_training_stop:
            return False
        return not self._has_length or self._order.delivered < self._batches_per_epoch

    def _note_position(self, *, ended: bool) -> None:
        order = self._order
        order.ended = ended
        self._progress.position = {
            "epoch": order.epoch,
            "updates": -(-order.delivered // self.trainer.args.gradient_accumulation_steps),
            "per_epoch": self._updates_per_epoch if self._has_length else None,
            "ended": ended,
        }

    def _ask(self, step: int) -> None:
        self._asked.step = step
        state = self.trainer.state
        if state.best_global_step:
            state.best_model_checkpoint = f"{self.url}@{state.best_global_step}"

    def save_checkpoint(self, original: Callable[..., Any], model: Any, trial: Any, *args: Any, **options: Any) -> None:
        trainer, step = self.trainer, self.trainer.state.global_step
        if self._exports:
            with _replaced(trainer.args, {"save_only_model": True}):
                original(model, trial, *args, **options)
            place = Path(trainer.args.output_dir) / f"checkpoint-{step}"
            if trainer.args.should_save:
                (place / EXPORTED).write_text(json.dumps({"where": self.url, "run": self.run, "step": step}) + "\n")
        self._ask(step)

    @property
    def _exports(self) -> bool:
        args = self.trainer.args
        return self._export or (args.push_to_hub and str(getattr(args.hub_strategy, "value", "")) != "end")

    def finalize_training(
        self, original: Callable[..., Any], trial: Any, samples: Any, start_time: float, *args: Any, **options: Any
    ) -> Any:
        if self._begin():  # no epoch was left
            self._is_over()
        self._checkpointer.close()  # with its last save, before the best model takes the place of the last
        with _replaced(
            self.trainer.args, {"save_total_limit": None}
        ):  # it would remove checkpoints of earlier trainings
            return original(trial, samples, start_time - self._earlier_s, *args, **options)

    def load_best_model(self, original: Callable[..., Any]) -> None:
        step = self.trainer.state.best_global_step
        try:
            load(self.where, {"model": self._state["model"]}, run=self.run, step=step, ranks=self._options.get("ranks"))
        except CheckpointNotFound as error:
            warn(f"the best model, of step {step}, is not loaded, and the last one stays: {error.message}")

    # -- what the Trainer would load by itself -------------------------------------------------------------------------

    def load_from_checkpoint(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return original(*args, **options) if self._found is None else None

    def load_optimizer_and_scheduler(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return original(*args, **options) if self._found is None else None

    def load_scaler(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return original(*args, **options) if self._found is None else None

    def load_rng_state(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if self._found is None:
            return original(*args, **options)
        return self._order.settle(self._checkpointer.restore_random_state)

    @property
    def _checkpointer(self) -> Checkpointer:
        assert self.checkpointer is not None, "only while it trains"
        return self.checkpointer


def attach(
    trainer: Any,
    where: Where,
    *,
    save: SavePolicy | None = None,
    keep: KeepPolicy | None = None,
    export: Export | None = None,
    **options: Any,
) -> Attachment:
    """Has a Trainer save and resume by Tenuto: `trainer.train()` then continues where the run in `where` has stopped.

    - `save`: when to save, in addition to the Trainer's own `save_strategy`. Without it: as that says, at the end, and
      on a signal.
    - `keep`: what to keep; by default `save_total_limit` checkpoints (3 where it is not set), and the best model's with
      `metric_for_best_model`.
    - `export="hf"`: also writes `checkpoint-N` in `output_dir` for `on_save` callbacks, without the optimizer, while
      training waits. With `push_to_hub` this is so by itself.
    - `options`: as of a Checkpointer: `run=`, `resume_from=`, `memory=`, `capture=`, …

    `resume_from_checkpoint` of `train` is obeyed: a directory of the Trainer's, or False for a new start. With
    adapters of PEFT only what is trained is saved; the base is named, with a digest.

    Raises UsageError for what is no Trainer, or for an option that a Checkpointer does not have.
    """
    known = inspect.signature(Checkpointer).parameters
    wrong = [name for name in options if name not in known or name in ("state", "data")]
    if wrong:
        raise UsageError(
            f"attach takes no {wrong[0]}=",
            subject=wrong[0],
            hint=did_you_mean(wrong[0], known) or "the keywords of tenuto.Checkpointer, without state and data",
        )
    if getattr(trainer, "tenuto", None) is not None:
        raise UsageError("Tenuto is attached to this Trainer already", subject="trainer", hint="attach once")
    if export not in (None, "hf"):
        raise UsageError(f"export={export!r} is not 'hf'", subject="export", hint='export="hf"')
    trainer.tenuto = found = Attachment(trainer, where, save=save, keep=keep, export=export, options=options)
    return found


class TenutoMixin:
    """For a class of trainers that all save by Tenuto: `class MyTrainer(TenutoMixin, SFTTrainer)`.

    `MyTrainer(…, tenuto="checkpoints")` or `MyTrainer(…, tenuto={"where": "checkpoints", "save": every(minutes=5)})`,
    with the arguments of `attach`; without it `output_dir`/tenuto.
    """

    args: Any
    tenuto: Any = None

    def __init__(self, *args: Any, tenuto: Where | Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        given = tenuto if isinstance(tenuto, Mapping) else {} if tenuto is None else {"where": tenuto}
        attach(self, **{"where": os.path.join(self.args.output_dir, "tenuto"), **given})


def _numbers(place: Path) -> Iterator[int]:
    """Yields the steps of the Trainer's checkpoints in a directory."""
    for path in place.glob("checkpoint-*"):
        number = path.name.removeprefix("checkpoint-")
        if number.isdigit():
            yield int(number)


@contextmanager
def _replaced(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Replaces attributes within the block."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
