"""The callback: saves and resumes `fit`."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import keras

from tenuto import log_lines
from tenuto.errors import PolicyConflict, UsageError
from tenuto.events import warn
from tenuto.integrations.keras import internals
from tenuto.integrations.keras.callback_states import CallbackStates, left_out
from tenuto.integrations.keras.data import ResumableData
from tenuto.integrations.keras.variables import GlobalSeed, MetricVariables, Variables, weights
from tenuto.maintenance.remove import execute, plan_remove
from tenuto.policy import every, keep, on
from tenuto.policy.keep import KeepPolicy
from tenuto.policy.numbers import direction_of
from tenuto.policy.save import Moment, SaveHistory, SavePolicy
from tenuto.repo.lineage import walk
from tenuto.repo.repository import Repo
from tenuto.store.contract import Where
from tenuto.store.registry import open_store, redirected
from tenuto.training.checkpointer import Checkpointer
from tenuto.units import count

WRAP: Final = (
    "wrap the data: data = tenuto.keras.resumable(x, y), fit(data, callbacks=[TenutoCheckpoint(…, data=data)])"
)


_KEEP: Final = frozenset({"save_top_k", "save_last", "max_to_keep"})
"""Keywords of a Checkpointer that say what to keep."""


class BestEpoch(SavePolicy):
    """Saves an epoch whose metric is better than that of every epoch before, and than `threshold`. It is told of epochs
    where they end: a policy that named its metric would have the state compared after each step."""

    def __init__(self, metric: str, mode: Literal["min", "max"], threshold: float | None) -> None:
        self._metric = metric
        self._mode = mode
        self._threshold = threshold
        self._reason: str | None = None

    def judge(self, value: float, best: float | None) -> float | None:
        """Returns the best value with this one."""
        bars = [bar for bar in (best, self._threshold) if bar is not None]
        better = not math.isnan(value) and all(value < bar if self._mode == "min" else value > bar for bar in bars)
        self._reason = f"{self._metric} is the best so far ({value:g})" if better else None
        return value if better else best

    def wants(self, now: Moment, history: SaveHistory) -> str | None:
        return self._reason if now.epoch_ended else None

    def __repr__(self) -> str:
        return f"save_best_only({self._metric!r}, mode={self._mode!r})"


class FitPosition:
    """What the Checkpointer is told of the data of a `fit`: it counts by itself, and says what it does not know."""

    def __init__(self, source: Any, progress: Mapping[str, Any]) -> None:
        self._source = source
        self._progress = progress
        self.fixed: tuple[str, ...] = ()
        self.caveats: tuple[str, ...] = ()

    @property
    def reasons(self) -> tuple[str, ...]:
        if self._source is not None or not self._progress["batch"]:
            return self.fixed
        return (*self.fixed, "saved inside an epoch of data that is not wrapped: a resume continues at its beginning")

    def __iter__(self) -> Iterator[Any]:
        raise UsageError("fit iterates its data itself", subject="data", hint="fit(data)")

    def state_dict(self) -> dict[str, Any]:
        return {"source": None if self._source is None else self._source.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._source is not None and state["source"] is not None:
            self._source.load_state_dict(state["source"])


class TenutoCheckpoint(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves a `fit` in the background, and resumes it where it was stopped: weights, optimizer, metrics, seeds,
    history, the other callbacks, random generators, and the position in the data.

    - `where`: a directory or URL. A `fit` with this callback first resumes from what is there.
    - `data`: what `tenuto.keras.resumable` returned and `fit` is given. Without it, a run that was stopped inside an
      epoch goes on at the beginning of that epoch.
    - `save_freq`: "epoch"; a number of batches; or False: neither.
    - `save_before_preemption`: save the last step when SIGTERM comes, and leave.
    - `monitor`, `mode`, `save_best_only`, `initial_value_threshold`: as in ModelCheckpoint: the best epoch is kept;
      with `save_best_only` only those that are better are saved, and the last. `save_top_k`, `save_last` and
      `max_to_keep` say otherwise what is kept, as for a Checkpointer.
    - `save_weights_only`: leave out the optimizer, metrics and other callbacks, which a resume then begins anew.
    - `delete_checkpoint`: remove the run's checkpoints once `fit` has ended.
    - `save`, `keep`, and all other keywords: as for `tenuto.Checkpointer`, instead of these names.

    The best epoch's weights: `tenuto.load(where, into={"weights": tenuto.keras.weights(model)}, step="best:val_loss")`.
    """

    def __init__(
        self,
        where: Where,
        *,
        data: Any = None,
        save_freq: int | Literal["epoch", False] = "epoch",
        save_before_preemption: bool = True,
        delete_checkpoint: bool = False,
        monitor: str | None = None,
        mode: Literal["auto", "min", "max"] = "auto",
        save_best_only: bool = False,
        save_weights_only: bool = False,
        initial_value_threshold: float | None = None,
        save: SavePolicy | None = None,
        keep: KeepPolicy | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        internals.warn_of_version()
        if save_best_only and monitor is None:
            monitor = "val_loss"
        self._where = where
        self._options = options
        self._best_epochs: BestEpoch | None = None
        self._best = (monitor, _direction(monitor, mode)) if monitor is not None else None
        self._save = save if save is not None else self._policy(save_freq, save_best_only, initial_value_threshold)
        if save is None and save_before_preemption:
            self._save |= on.signal()
        self._keep = keep
        if keep is None and _KEEP.isdisjoint(options):
            self._keep = self._kept()
        elif keep is None and self._best is not None:  # what they mean to a Checkpointer depends on these
            self._options = {**options, "monitor": self._best[0], "mode": self._best[1]}
        self._weights_only = save_weights_only
        self._delete = delete_checkpoint
        self._source = _checked(data)
        self._others: list[Any] = []
        self._pending: tuple[int, dict[str, Any]] | None = None
        """The step that is done and not told yet, with its metrics: the last of an epoch, whose end belongs to it."""
        self._resumed_at: tuple[int, int] | None = None
        """Epoch and batch at which this `fit` goes on, until it does."""
        self._offset = 0
        """Batches of this epoch that an earlier process has done: Keras counts from 0."""
        self._cut = False
        """Whether the rest of an epoch was ended here: Keras counts on to the number of a whole one."""
        self.checkpointer: Checkpointer | None = None
        """The Checkpointer of this `fit`, or of the last one."""

    def _policy(self, save_freq: object, best_only: bool, threshold: float | None) -> SavePolicy:
        if threshold is not None and not best_only:
            raise PolicyConflict(
                "initial_value_threshold has no effect without save_best_only=True",
                subject="initial_value_threshold",
                hint="save_best_only=True",
            )
        if best_only:
            assert self._best is not None
            self._best_epochs = BestEpoch(*self._best, threshold)
            return self._best_epochs | on.end()
        if save_freq == "epoch":
            return every(epochs=1) | on.end()
        if save_freq is False:
            return on.end()
        if not isinstance(save_freq, int) or save_freq is True or save_freq < 1:
            raise UsageError(
                f"save_freq={save_freq!r} is neither 'epoch', a number of batches, nor False",
                subject="save_freq",
                hint='save_freq="epoch"',
            )
        return every(steps=save_freq) | every(epochs=1) | on.end()

    def _kept(self) -> KeepPolicy:
        return keep.latest(3) if self._best is None else keep.latest(1) | keep.best(1, *self._best)

    # -- what fit calls ------------------------------------------------------------------------------------------------

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        found = internals.callback_list()
        if found is not None:
            self._others = [one for one in found.callbacks if one is not self]
            # Behind all others: what they do at a hook belongs to the step that is saved in it.
            found.callbacks = [_First(self), *self._others, self]

    def on_train_begin(self, logs: Any = None) -> None:
        self._check_steps()
        self._build(self.model)
        self._progress: dict[str, Any] = {"epoch": 0, "batch": 0, "best": None}
        position = FitPosition(self._source, self._progress)
        position.fixed = self._gaps()
        if unsaved := left_out(self._others):
            position.caveats = (f"callbacks whose state is not saved: {', '.join(unsaved)}",)
            warn(f"the state of {', '.join(unsaved)} is not saved; give the class state_dict and load_state_dict")
        self.checkpointer = Checkpointer(
            self._where,
            self._state(),
            data=position,
            save=self._save,
            keep=self._keep,
            **self._options,
        )
        restored = self.checkpointer.restore()
        self._resumed_at, self._pending, self._offset = None, None, 0
        if restored is not None:
            self._resume()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        assert self.checkpointer is not None
        at, self._resumed_at = self._resumed_at, None
        self._offset = at[1] if at is not None and at[0] == epoch else 0
        if at is not None:
            self._metrics.put_back(inside_epoch=self._offset > 0)
        if self._source is not None:
            self._source.begin(epoch, self._offset)
        if at is not None:
            self.checkpointer.restore_random_state()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._pending is not None and not self._steps_known:
            self._complete_step()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        assert self.checkpointer is not None
        steps = self.params.get("steps") if self._steps_known else None
        done = self._offset + batch + 1
        done = done if steps is None else min(done, steps)
        before = self._progress["batch"]
        self._pending = (self.checkpointer.step + done - before, _numbers(logs))
        self._progress["batch"] = done
        if self._source is not None:
            self._source.trained(self._progress["epoch"], done)
        # The last step of an epoch is told with what follows it: the validation, and what other callbacks make of it.
        if self._model.stop_training:
            return
        if steps is not None and done < steps:
            self._complete_step()
        elif self._offset:
            # Not by running the data out: TensorFlow runs half a step then, which moves seeds and counters on.
            self._cut = self._model.stop_training = True

    def batches_ended(self) -> None:
        """Called where the batches of an epoch are done, before any other callback hears of it."""
        if self._cut and self._source is not None:
            self._cut = self._model.stop_training = False
            self._source.on_epoch_end()  # which Keras leaves out where it is told to stop

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        assert self.checkpointer is not None
        self._progress.update(epoch=epoch + 1, batch=0)
        if self._source is not None:
            self._source.trained(epoch + 1, 0)
        if epoch + 1 >= self.params["epochs"] or self._model.stop_training:
            # What follows changes the weights (an average takes their place, or the best ones): no step is saved then.
            self.checkpointer.stop()
        numbers = _numbers(logs)
        if self._best_epochs is not None and self._best is not None and self._best[0] in numbers:
            self._progress["best"] = self._best_epochs.judge(numbers[self._best[0]], self._progress["best"])
        if self._pending is not None:
            step, metrics = self._pending
            self._pending = None
            self.checkpointer.step_done(step, epoch=epoch + 1, epoch_ended=True, **{**metrics, **numbers})

    def on_train_end(self, logs: Any = None) -> None:
        assert self.checkpointer is not None
        internals.set_initial_epoch(self._model, None)  # it would outlast this fit
        if self._resumed_at is not None:  # nothing was left to train
            self.checkpointer.restore_random_state()
        self.checkpointer.close()
        if self._delete:
            self._remove()

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _check_steps(self) -> None:
        steps, batches = self.params.get("steps"), None if self._source is None else self._source.num_batches
        if batches is not None and steps != batches:
            raise UsageError(
                f"fit has {steps} steps in an epoch, and its data= {batches} batches",
                subject="steps_per_epoch",
                hint="leave steps_per_epoch out, and give fit what data= is given",
            )

    def _build(self, model: Any) -> None:
        """Makes what `fit` on TensorFlow makes in its first step only, so that it can be filled."""
        if internals.backend() == "tensorflow" and self._source is not None:
            internals.build_symbolically(model, self._source.first_batch())
        if not model.built:
            raise UsageError(
                f"the model {model.name} is not built, so it has no variables to restore",
                subject=model.name,
                hint="begin it with keras.Input(shape), or call it on a batch before fit",
            )
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)

    def _state(self) -> dict[str, Any]:
        model = self._model
        self._metrics = MetricVariables("metrics", lambda: self.model.metrics_variables)
        state: dict[str, Any] = {
            "weights": weights(self.model),
            "progress": self._progress,
        }
        if not self._weights_only:
            state["optimizer"] = Variables("optimizer", lambda: self.model.optimizer.variables)
            state["metrics"] = self._metrics
            state["callbacks"] = CallbackStates(self._others)
        state["seed"] = GlobalSeed()
        assert model is not None
        return state

    def _gaps(self) -> tuple[str, ...]:
        found = []
        if self._weights_only:
            found.append("save_weights_only=True: the optimizer and other callbacks start again")
        if self._source is None and internals.backend() == "tensorflow":
            found.append(
                "no data= was given: on TensorFlow, the order in which fit shuffles arrays and the state of a "
                "tf.data.Dataset are not saved"
            )
        return tuple(found)

    def _resume(self) -> None:
        epoch, batch = self._progress["epoch"], self._progress["batch"]
        if batch and self._source is None:
            warn(f"training continues at the beginning of epoch {epoch + 1}, of which {batch} batches are done: {WRAP}")
            batch = self._progress["batch"] = 0
        if epoch >= self.params["epochs"]:
            log_lines.log(
                logging.INFO,
                f"fit(epochs={self.params['epochs']}) was over when the checkpoint was saved: nothing is left to train."
                " Give it more epochs, or begin another run: TenutoCheckpoint(…, run='new')",
            )
        self._resumed_at = (epoch, batch)
        internals.set_initial_epoch(self._model, epoch)
        for one in self._others:
            if isinstance(one, keras.callbacks.CSVLogger) and not one.append:
                warn(f"CSVLogger has started {one.filename} again; with append=True it continues")

    @property
    def _steps_known(self) -> bool:
        return bool(self.params.get("steps"))

    def _complete_step(self) -> None:
        assert self.checkpointer is not None and self._pending is not None
        step, metrics = self._pending
        self._pending = None
        self.checkpointer.step_done(step, epoch=self._progress["epoch"], epoch_ended=False, **metrics)

    def _remove(self) -> None:
        repo, run = Repo.open(open_store(redirected(self._where))), self._options.get("run", "main")
        ids = list(walk(repo, run))
        execute(repo, plan_remove(repo, ids, force=True))
        log_lines.log(
            logging.INFO,
            f"fit has ended, and delete_checkpoint=True has removed {count(len(ids), 'checkpoint')} of run {run}",
        )


class _First(keras.callbacks.Callback):  # type: ignore[misc]
    """Tells a TenutoCheckpoint of the end of an epoch's batches before other callbacks hear of it."""

    def __init__(self, checkpoint: TenutoCheckpoint) -> None:
        super().__init__()
        self._checkpoint = checkpoint

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._checkpoint.batches_ended()


def _numbers(logs: Mapping[str, Any] | None) -> dict[str, float]:
    found = {}
    for name, value in (logs or {}).items():
        if isinstance(value, int | float) or getattr(value, "size", 0) == 1:
            found[name] = float(value)
    return found


def _direction(monitor: str, mode: str) -> Literal["min", "max"]:
    """Returns how a metric improves. "auto": by its name."""
    if mode != "auto":
        return "max" if mode == "max" else "min"
    found = direction_of(monitor)
    if found is not None:
        return found
    raise UsageError(
        f"monitor={monitor!r}: its name does not say whether more or less is better",
        subject="mode",
        hint='mode="max" or mode="min"',
    )


def _checked(data: Any) -> ResumableData | None:
    if data is None or isinstance(data, ResumableData):
        return data
    raise UsageError(
        f"data={type(data).__name__} does not say where it is, as fit reads it",
        subject="data",
        hint="data = tenuto.keras.resumable(…), given to fit and as data=",
    )
