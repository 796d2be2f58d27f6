"""The Trainer's fit loop, followed from outside: where a step is over, where training begins, and how it continues
from any step.

Lightning's own hooks come too early to save a step: behind `on_train_batch_end` of a callback follow that of the
module, the validation, the schedulers that wait for it, and the loggers. What is saved here is saved behind all of
these, and Lightning's flags of a restart, which mean its own places to save, are taken back once the counters are in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol

import torch

from tenuto.integrations.lightning.data import FitPosition
from tenuto.integrations.lightning.packages import RESUMING

_METRICS: Final = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_VALIDATION: Final = "epoch_loop.val_loop.batch_progress"


class Followed(Protocol):
    """What follows a fit."""

    def training_begins(self) -> None:
        """Called behind `on_train_start`, before the first batch and before what it draws."""

    def random_state(self) -> None:
        """Called where the random generators have to be as they were saved."""

    def step_done(self, *, epoch_ended: bool, validated: bool) -> None:
        """Called where everything that belongs to a step is over."""

    def training_ends(self) -> None:
        """Called behind the last step, before `on_train_end`."""


class FitLoop:
    """One fit of a Trainer, followed between `follow` and `leave`."""

    def __init__(self, trainer: Any, position: FitPosition, followed: Followed) -> None:
        self._trainer = trainer
        self._fit, self._epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._position = position
        self._followed = followed
        self._replaced: list[tuple[Any, str]] = []
        self._details: Mapping[str, Any] | None = None
        self._validated_before: Mapping[str, Any] | None = None
        """The restored progress of the last validation."""
        self._begun = False
        self._validations = 0
        position.logged = self._logged
        self._logged_before: dict[str, Any] = {}

    def follow(self, restored: Mapping[str, Any] | None, loops: Mapping[str, Any] | None = None) -> None:
        """Begins to follow. `restored`: what `details` returned when the restored checkpoint was made, and `loops` what
        the fit loop's `state_dict` returned."""
        self._details = restored
        self._validated_before = (loops or {}).get(_VALIDATION)
        self._replace(self._fit, "run", self._run)
        self._replace(self._fit, "on_run_start", self._run_start)
        self._replace(self._fit, "on_advance_end", self._epoch_done)
        self._replace(self._fit, "on_run_end", self._run_end)
        self._replace(self._fit, "_load_combined_loader_states", self._count_loaders)
        self._replace(self._epoch, "on_run_start", self._epoch_start)
        self._replace(self._epoch, "on_advance_end", self._batch_done)

    def leave(self) -> None:
        while self._replaced:
            owner, name = self._replaced.pop()
            vars(owner).pop(name, None)

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        setattr(owner, name, partial(function, getattr(owner, name)))
        self._replaced.append((owner, name))

    def validated(self) -> None:
        self._validations += 1

    def details(self) -> dict[str, Any]:
        """Returns what Lightning's own state lacks."""
        logger = self._trainer._logger_connector
        return {
            "inside": not self._position.over,
            "should_stop": bool(self._trainer.should_stop),
            "stepped": self._epoch._batches_that_stepped,
            "metrics": {name: dict(getattr(logger, name)) for name in _METRICS},
        }

    # -- what the loops call in place of their own -------------------------------------------------------------------

    def _run(self, inner: Callable[[], None]) -> None:
        if self._validated_before is not None:
            # Lightning resumes from the end of an epoch with its sanity check, which sets the restored counters to 0.
            self._epoch.val_loop.batch_progress.load_state_dict(self._validated_before)
        inner()
        if self._details is not None and not self._begun and self._fit.done:
            # The restored fit was over. Its end may not have been reached then, and changes the model: averaged weights
            # are put into it there.
            self._fit.on_run_start()
            self._fit.on_run_end()

    def _count_loaders(self, inner: Callable[[], None]) -> None:
        combined = self._fit._combined_loader
        if combined is not None:
            combined.flattened = self._position.count(combined.flattened)

    def _run_start(self, inner: Callable[[], None]) -> None:
        inner()
        self._begun = True
        if self._details is not None:
            self._restore_details(self._details)
        if not self._position.inside:
            if self._details is not None:
                self._not_restarting()
                self._position.begin_epoch()
            self._followed.random_state()
        self._followed.training_begins()

    def _epoch_start(self, inner: Callable[[Any], None], fetcher: Any) -> None:
        inner(fetcher)
        if self._position.inside:
            self._position.inside = False
            self._not_restarting()
            if self._details is not None:
                self._epoch._batches_that_stepped = self._details["stepped"]
            self._put_logged(self._position.logged_before)
            self._followed.random_state()
        self._position.batch_read()

    def _batch_done(self, inner: Callable[[Any], None], fetcher: Any) -> None:
        inner(fetcher)
        if not self._epoch.done:
            self._position.over = False
            self._done(epoch_ended=False)

    def _epoch_done(self, inner: Callable[[], None]) -> None:
        inner()
        vars(self._epoch._results).pop("update_metrics", None)
        self._position.over = True
        self._done(epoch_ended=True)

    def _done(self, *, epoch_ended: bool) -> None:
        validated, self._validations = self._validations > 0, 0
        self._followed.step_done(epoch_ended=epoch_ended, validated=validated)
        self._position.batch_read()

    def _run_end(self, inner: Callable[[], None]) -> None:
        self._followed.training_ends()
        inner()

    # -- restoring ---------------------------------------------------------------------------------------------------

    def _not_restarting(self) -> None:
        """Takes back what Lightning does in the first epoch and with the first batch after a restart: it would run the
        epoch's end, a validation or a scheduler's step again, or leave one out."""
        inner = [loop for loop in vars(self._epoch).values() if hasattr(loop, "_restarting")]
        for loop in (self._fit, self._epoch, *inner):
            for flag in RESUMING:  # not by the setter: with max_steps it says that any fit is restarting
                if flag in vars(loop):
                    setattr(loop, flag, False)

    def _restore_details(self, details: Mapping[str, Any]) -> None:
        self._trainer.should_stop = details["should_stop"]
        device = self._trainer.strategy.root_device
        for name, metrics in details["metrics"].items():
            found = {key: _to(value, device) for key, value in metrics.items()}
            getattr(self._trainer._logger_connector, name).update(found)

    # -- what an epoch has logged so far -----------------------------------------------------------------------------

    def _logged(self) -> dict[str, Any]:
        """Returns the sums behind the means of the open epoch, and the state of the metrics that are no part of the
        model's own."""
        sums = {}
        for key, metric in self._epoch._results.items():
            if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset:
                sums[key] = [metric.value, getattr(metric, "cumulated_batch_size", None)]
        return {"sums": sums, "metrics": {name: _metric_state(one) for name, one in self._metrics()}}

    def _put_logged(self, logged: Mapping[str, Any]) -> None:
        states = logged.get("metrics", {})
        for name, metric in self._metrics():
            if name in states:
                _put_metric_state(metric, states[name])
        sums = dict(logged.get("sums", {}))
        results = self._epoch._results
        inner = results.update_metrics

        def update(key: str, value: Any, batch_size: int) -> None:
            # Lightning makes a metric when it is first logged, and its sum begins with what was logged before.
            if key in sums:
                metric = results[key]
                total, count = sums.pop(key)
                metric.value = total.to(value.device)
                if count is not None:
                    metric.cumulated_batch_size = count.to(value.device)
            inner(key, value, batch_size)

        if sums:
            results.update_metrics = update

    def _metrics(self) -> list[tuple[str, Any]]:
        """Returns the metrics (of torchmetrics) that are attributes of the model."""
        modules = self._trainer.lightning_module.named_modules()
        return [(name, one) for name, one in modules if hasattr(one, "metric_state") and hasattr(one, "_defaults")]


def _to(value: Any, device: Any) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _metric_state(metric: Any) -> dict[str, Any]:
    state = {name: list(value) if isinstance(value, list) else value for name, value in metric.metric_state.items()}
    return {"state": state, "updates": metric._update_count}


def _put_metric_state(metric: Any, saved: Mapping[str, Any]) -> None:
    for name, value in saved["state"].items():
        placed = [one.to(metric.device) for one in value] if isinstance(value, list) else value.to(metric.device)
        setattr(metric, name, placed)
    metric._update_count = saved["updates"]
    metric._computed = None
