"""The callback in place of Lightning's ModelCheckpoint."""

from __future__ import annotations

import inspect
import logging
import signal
import threading
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch

from tenuto import log_lines
from tenuto.concurrency.worker_threads import end_idle_threads
from tenuto.engine.read.opened import Opened
from tenuto.errors import PolicyConflict, UsageError
from tenuto.events import warn
from tenuto.integrations.lightning import paths
from tenuto.integrations.lightning.data import FitPosition
from tenuto.integrations.lightning.loops import FitLoop
from tenuto.integrations.lightning.packages import check, overridden, tuning
from tenuto.integrations.lightning.trainer_state import ENTRY, LoadedCheckpoint, TrainerState
from tenuto.policy import every, on
from tenuto.policy.keep import KeepPolicy
from tenuto.policy.numbers import direction_of
from tenuto.policy.save import SavePolicy
from tenuto.state.declarations import first_rank, late
from tenuto.store.contract import Where
from tenuto.training.checkpointer import Checkpointer

_OWN = frozenset({"where", "state", "data", "save", "keep", "monitor", "mode", "save_top_k", "save_last"})
_SWA = (
    "StochasticWeightAveraging makes its scheduler and its last epoch in hooks that a resumed fit does not call again, "
    "and restores neither; WeightAveraging and EMAWeightAveraging resume exactly"
)
_MANUAL = "gradients that manual optimization keeps over a step are not saved"
_BY_BATCHES = (
    "manual optimization calls its optimizers past Lightning, whose global_step stays at {}: here each batch counts as "
    "a step, and so do every_n_train_steps and every(steps=). Optimizers of self.optimizers() are counted by Lightning"
)
_NOT_RETURNED = "configure_optimizers returns none, so the state of the module's own optimizer is not saved"
_NO_OPTIMIZER = "_MockOptimizer"
"""What Lightning puts in the place of an optimizer where configure_optimizers returns none."""
_UNCOUNTED = (
    "Lightning counts no step of this manual optimization: return its optimizers from configure_optimizers, which also "
    "saves their state, and take them from self.optimizers()"
)
_NOT_METRICS = frozenset({"step", "epoch", "epoch_ended", "self"})


class TenutoCheckpoint:
    """Saves a Lightning Trainer's whole state in the background, and resumes it by itself, inside an epoch too.

    `Trainer(callbacks=[TenutoCheckpoint("checkpoints", monitor="val_loss", save_top_k=3)])` in place of a
    ModelCheckpoint. A `fit` continues where the newest whole checkpoint of the run is: model, optimizers, schedulers,
    callbacks, loops, loggers' step, random state, and the position in the data. Steps are Lightning's `global_step`.

    - `where`: a directory, a URL, or a store.
    - `monitor`, `mode`, `save_top_k`, `save_last`: as in ModelCheckpoint: which checkpoints are kept, and, with
      `monitor`, that one is saved where it has improved.
    - `every_n_train_steps`, `every_n_epochs`: when to save, in addition to the end and to a signal.
    - `save`, `keep`: policies in their place (`tenuto.every`, `tenuto.on`, `tenuto.keep`).
    - `options`: every other argument of `tenuto.Checkpointer`, such as `run=`, `resume_from=` or `capture=`.

    A `ckpt_path=` that is given to `fit` is obeyed, and nothing is resumed then. Raises UsageError and PolicyConflict
    for arguments that make no sense; in `fit` whatever a Checkpointer raises.
    """

    def __init__(
        self,
        where: Where,
        *,
        save: SavePolicy | None = None,
        keep: KeepPolicy | None = None,
        monitor: str | None = None,
        mode: Literal["min", "max"] | None = None,
        save_top_k: int | None = None,
        save_last: bool | None = None,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.where = where
        self.monitor, self.save_top_k, self.save_last = monitor, save_top_k, save_last
        self.mode = mode or (None if monitor is None else direction_of(monitor)) or "min"
        self.every_n_train_steps, self.every_n_epochs = every_n_train_steps, every_n_epochs
        known = inspect.signature(Checkpointer).parameters.keys() - _OWN
        for name in options:
            if name not in known:
                raise UsageError(
                    f"TenutoCheckpoint has no argument {name!r}",
                    subject=name,
                    hint="it takes those of tenuto.Checkpointer, but for state and data, which are the Trainer's own",
                )
        self._options = {
            **options,
            "save": _policy(save, every_n_train_steps, every_n_epochs),
            "keep": keep,
            "monitor": monitor,
            "mode": mode,
            "save_top_k": save_top_k,
            "save_last": save_last,
        }
        self._ckpt: Checkpointer | None = None
        self._state: dict[str, Any] = {}
        self._position = FitPosition()
        self._trainer_state = TrainerState()
        self._loop: FitLoop | None = None
        self._loaded: LoadedCheckpoint | None = None
        self._restored = False
        self._trainer: Any = None
        self._sigterm: Any = None
        self._by_batches = False
        """Whether steps are batches, since manual optimization takes its own past Lightning's count."""
        self._updates: OptimizerUpdates | None = None

    # -- what ModelCheckpoint tells ----------------------------------------------------------------------------------

    @property
    def best_model_path(self) -> str:
        """The path of the best checkpoint by `monitor`, of the newest without one; empty if there is none.

        `trainer.test(ckpt_path="best")` and `load_from_checkpoint` read it; `tenuto.load(where, step=…)` does too.
        """
        found = self._best()
        return "" if found is None else paths.path_of(found)

    @property
    def best_model_score(self) -> Any:
        """The best value of `monitor` as a tensor; None if there is none."""
        found = self._best() if self.monitor is not None else None
        return None if found is None or self.monitor is None else torch.tensor(found.metrics[self.monitor])

    @property
    def last_model_path(self) -> str:
        """The path of the newest checkpoint; empty if there is none."""
        found = paths.find(self.where, self._run, "latest")
        return "" if found is None else paths.path_of(found)

    def _best(self) -> Opened | None:
        best = "latest" if self.monitor is None else f"best:{self.monitor}:{self.mode}"
        return paths.find(self.where, self._run, best)

    @property
    def _run(self) -> str:
        return str(self._options.get("run", "main"))

    # -- the life of a fit -------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        paths.register()
        if stage != "fit" or trainer.fast_dev_run or tuning(trainer):
            return
        check(trainer)
        self._trainer = trainer
        self._open()
        opened = self._checkpointer.peek()
        if opened is not None:
            self._loaded = LoadedCheckpoint(opened)
            # Lightning restores from it, at the places and in the order in which it would from a file.
            trainer._checkpoint_connector._loaded_checkpoint = self._loaded

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self._ckpt is None:
            return
        self._sigterm = signal.getsignal(signal.SIGTERM)
        given = trainer.ckpt_path
        if given is not None:
            self._start_from(given)
        self._state["model"] = trainer.strategy.model
        optimizers = [one for one in trainer.optimizers if type(one).__name__ != _NO_OPTIMIZER]
        self._state["optimizers"] = {str(number): one for number, one in enumerate(optimizers)}
        if given is None:
            strict = pl_module.strict_loading and not overridden("on_load_checkpoint", pl_module)
            restored = self._checkpointer.restore(strict=strict)
            self._restored = restored is not None
            if restored is not None and restored.left:
                log_lines.log(
                    logging.INFO, f"not restored, since on_load_checkpoint or strict_loading allows it: {restored.left}"
                )
        if any(base.__name__ == "StochasticWeightAveraging" for one in trainer.callbacks for base in type(one).__mro__):
            self._position.gaps = (_SWA,)
            warn(f"a resume is not exact: {_SWA}")
        if not pl_module.automatic_optimization:
            self._position.doubts = (_MANUAL,)
            self._updates = OptimizerUpdates(optimizers)
            if not optimizers:
                self._position.gaps = (*self._position.gaps, _NOT_RETURNED)
        self._loop = FitLoop(trainer, self._position, self)
        self._trainer_state.details = self._loop.details
        if self._loaded is None:
            self._loop.follow(None)
        else:
            self._loop.follow(self._loaded.details, self._loaded.get("loops", {}).get("fit_loop"))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._loop is not None and not trainer.sanity_checking:
            self._loop.validated()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._ckpt is not None:
            self._leave(failed=exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._ckpt is not None and stage == "fit":
            self._leave()

    # -- what the loop tells -----------------------------------------------------------------------------------------

    def training_begins(self) -> None:
        ckpt = self._checkpointer
        save = self._options["save"]
        if (save is None or save.catches_signals) and threading.current_thread() is threading.main_thread():
            # Lightning's own handler ends training with the exit status 0 and nothing saved, and with several ranks it
            # begins a collective in the middle of whatever was running.
            signal.signal(signal.SIGTERM, self._sigterm if self._sigterm is not None else signal.SIG_DFL)
            if self._trainer.received_sigterm:  # before the first step: there is nothing to save
                signal.raise_signal(signal.SIGTERM)
        self._trainer_state.begin(self._trainer)
        self._global_step = int(self._trainer.global_step)
        self._loaded = None
        ckpt.prepare()

    def random_state(self) -> None:
        if self._restored:  # not where a ckpt_path is given
            self._checkpointer.restore_random_state()

    def step_done(self, *, epoch_ended: bool, validated: bool) -> None:
        ckpt, trainer = self._checkpointer, self._trainer
        number = self._completed()
        if number <= ckpt.step:  # gradients are being accumulated, and are no part of a checkpoint
            if self._updates is not None:
                ckpt.batch_done(epoch_ended=epoch_ended, why=_UNCOUNTED)
            return
        due = self.every_n_train_steps and number % self.every_n_train_steps == 0
        metrics = self._metrics() if epoch_ended or validated or due else {}
        ckpt.step_done(
            number, epoch=trainer.fit_loop.epoch_progress.current.processed, epoch_ended=epoch_ended, **metrics
        )

    def training_ends(self) -> None:
        self._leave()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _completed(self) -> int:
        """Returns the number of completed steps."""
        counted, ckpt = int(self._trainer.global_step), self._checkpointer
        if self._updates is not None and not self._by_batches:
            passed = (self._updates.count > 0 or not self._state["optimizers"]) and counted <= self._global_step
            if passed or ckpt.step > counted:  # the latter: the run was saved so
                self._by_batches = True
                log_lines.log(logging.WARNING, _BY_BATCHES.format(counted))
            elif counted > self._global_step:
                self._updates.close()
        return self._trainer.fit_loop.epoch_loop.total_batch_idx + 1 if self._by_batches else counted

    @property
    def _checkpointer(self) -> Checkpointer:
        assert self._ckpt is not None, "called inside a fit"
        return self._ckpt

    def _open(self, **instead: Any) -> None:
        self._position, self._trainer_state, self._restored = FitPosition(), TrainerState(), False
        self._by_batches, self._updates, self._global_step = False, None, 0
        self._state = {"model": late(), "optimizers": late(), ENTRY: first_rank(self._trainer_state)}
        self._ckpt = Checkpointer(self.where, self._state, data=self._position, **{**self._options, **instead})

    def _start_from(self, given: Any) -> None:
        """Trains from what `ckpt_path` names, and not from the run's own checkpoints."""
        ckpt, loaded = self._checkpointer, self._loaded
        if loaded is None:
            return
        log_lines.log(
            logging.INFO,
            f"training begins from ckpt_path={given!s}: the checkpoints of run {self._run!r} are left behind",
        )
        ckpt.close()
        self._loaded = None
        self._open(resume_from=None)

    def _leave(self, failed: BaseException | None = None) -> None:
        ckpt, self._ckpt = self._checkpointer, None
        if self._loop is not None:
            self._loop.leave()
        self._loop = self._loaded = None
        if self._updates is not None:
            self._updates.close()
        try:
            ckpt.close(failed=failed)
        finally:
            end_idle_threads()

    def _metrics(self) -> Mapping[str, Any]:
        """Returns Lightning's metrics that are numbers."""
        found = self._trainer.callback_metrics.items()
        return {name: value for name, value in found if name not in _NOT_METRICS and value.numel() == 1}


class OptimizerUpdates:
    """Counts the updates of optimizers, whoever calls them, until `close`."""

    def __init__(self, optimizers: Iterable[Any]) -> None:
        self.count = 0
        known = [one for one in optimizers if isinstance(one, torch.optim.Optimizer)]
        self._hooks = [one.register_step_post_hook(self._updated) for one in known]

    def _updated(self, *_: Any) -> None:
        self.count += 1

    def close(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()


def _policy(save: SavePolicy | None, steps: int | None, epochs: int | None) -> SavePolicy | None:
    asked = [every(steps=steps)] if steps else []
    asked += [every(epochs=epochs)] if epochs else []
    if not asked:
        return save
    if save is not None:
        raise PolicyConflict(
            f"save={save!r} says when to save, and so do every_n_train_steps and every_n_epochs",
            subject="save",
            hint="save=every(steps=…) | every(epochs=…) | on.end() | on.signal()",
        )
    found: SavePolicy = on.end() | on.signal()
    for one in asked:
        found = found | one
    return found
