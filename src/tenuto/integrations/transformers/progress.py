"""What a Trainer counts outside its model, optimizer and scheduler, as entries of a checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

import torch

from tenuto.errors import CorruptionError
from tenuto.repo.best import TRAINERS_BEST

BEST: Final = TRAINERS_BEST
"""The metric that says which model is the best: of a step that made a new best one its number, else 0. keep.best keeps
a checkpoint without its metric, which may still come."""
NO_METRICS: Final = ("step", "epoch")
OWN: Final = ("_metrics", "_total_train_tokens")
"""Attributes in which TRL's trainers gather what they log next."""


class TrainerProgress:
    """The Trainer's state as in trainer_state.json, and what it keeps beside it, the same on all ranks."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.loaded: Mapping[str, Any] | None = None
        """What was restored, until training begins: the Trainer resets it before that."""
        self.position: Mapping[str, Any] = {}
        self.base: Mapping[str, Any] | None = None
        """The frozen model below trained adapters."""
        self._began_s = time.monotonic()
        self._seconds = 0.0
        self._history: list[str] = []

    def reset(self) -> None:
        """Gives the Trainer what it begins to count with, as it will itself before the first step."""
        trainer = self._trainer
        trainer._tr_loss = torch.tensor(0.0, device=trainer.args.device)
        trainer._total_loss_scalar = 0.0
        trainer._globalstep_last_logged = trainer._initial_global_step = trainer.state.global_step

    def begin(self) -> float:
        """Takes over what was restored. Returns the seconds that the processes before have trained."""
        trainer, loaded, self.loaded = self._trainer, self.loaded, None
        self._began_s, self._seconds = time.monotonic(), 0.0
        self._history = []
        if loaded is not None:
            trainer._total_loss_scalar = loaded["total_loss"]
            trainer._globalstep_last_logged = loaded["last_logged"]
            trainer._initial_global_step = loaded["first_step"]
            self._seconds = loaded["seconds"]
        return self._seconds

    def state_dict(self) -> dict[str, Any]:
        if self.loaded is not None:
            return dict(self.loaded)
        trainer = self._trainer
        return {
            "state": self.text(),
            "total_loss": float(trainer._total_loss_scalar),
            "last_logged": int(trainer._globalstep_last_logged),
            "first_step": int(trainer._initial_global_step),
            "seconds": self._seconds + time.monotonic() - self._began_s,
            "position": dict(self.position),
            "base": None if self.base is None else dict(self.base),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loaded = dict(state)

    def text(self) -> str:
        """Returns trainer_state.json. The history grows without end, and a save may be asked for at every step: each
        of its entries is spelled once."""
        state = self._trainer.state
        history = state.log_history
        if len(self._history) > len(history):
            self._history = []
        self._history += [json.dumps(entry, sort_keys=True) for entry in history[len(self._history) :]]
        others = {one.name: getattr(state, one.name) for one in fields(state) if one.name != "log_history"}
        others["stateful_callbacks"] = callback_states(self._trainer)
        head = json.dumps(others, sort_keys=True)
        return f'{head[:-1]}, "log_history": [{", ".join(self._history)}]}}'


class RankProgress:
    """What each rank has of its own: the loss since the last log, floating-point operations, what TRL gathers."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.loaded: Mapping[str, Any] | None = None

    def begin(self) -> None:
        trainer, loaded, self.loaded = self._trainer, self.loaded, None
        if loaded is None:
            return
        trainer._tr_loss = loaded["loss"].to(trainer._tr_loss.device)
        trainer.current_flos = loaded["flos"]
        for name, value in json.loads(loaded["own"]).items():
            mine = getattr(trainer, name, None)
            if isinstance(mine, Mapping):
                for mode, gathered in value.items():
                    mine[mode].update(gathered)
            elif mine is not None:
                setattr(trainer, name, value)

    def state_dict(self) -> dict[str, Any]:
        if self.loaded is not None:
            return dict(self.loaded)
        trainer = self._trainer
        own = {name: getattr(trainer, name) for name in OWN if hasattr(trainer, name)}
        return {
            "loss": trainer._tr_loss.detach(),
            "flos": float(trainer.current_flos),
            "own": json.dumps(own, default=float),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loaded = dict(state)


# -- callbacks ---------------------------------------------------------------------------------------------------------


def callback_states(trainer: Any) -> dict[str, Any]:
    """Returns the states of callbacks that have one, and of the control, as trainer_state.json has them."""
    found: dict[str, Any] = {}
    for callback in stateful(trainer):
        name, state = type(callback).__name__, callback.state()
        if name in found:
            found[name] = [*(found[name] if isinstance(found[name], list) else [found[name]]), state]
        else:
            found[name] = state
    return found


def restore_callbacks(trainer: Any, states: Mapping[str, Any]) -> None:
    """Restores what callbacks have counted, in place. Their arguments are those of this program, and the control's
    switches begin anew."""
    met: dict[str, int] = {}
    for callback in stateful(trainer):
        if callback is trainer.control:
            continue
        name = type(callback).__name__
        number, saved = met.get(name, 0), states.get(name, ())
        met[name] = number + 1
        saved = saved if isinstance(saved, list) else [saved]
        if number < len(saved) and saved[number]:
            for attribute, value in saved[number].get("attributes", {}).items():
                setattr(callback, attribute, value)


def stateful(trainer: Any) -> list[Any]:
    from transformers.trainer_callback import ExportableState

    return [one for one in (*trainer.callback_handler.callbacks, trainer.control) if isinstance(one, ExportableState)]


def read_state(text: Any, where: str) -> dict[str, Any]:
    """Returns the content of a saved trainer_state.json."""
    try:
        found = json.loads(text)
    except (TypeError, ValueError) as error:
        raise CorruptionError(f"{where}: its trainer_state.json cannot be read: {error}", subject=where) from error
    if not isinstance(found, dict) or not isinstance(found.get("global_step"), int):
        raise CorruptionError(f"{where}: its trainer_state.json has no global_step", subject=where)
    return found


def metrics_of(trainer: Any, step: int) -> dict[str, float]:
    """Returns the numbers that the Trainer has logged at this step."""
    found: dict[str, float] = {}
    for entry in reversed(trainer.state.log_history):
        if entry.get("step") != step:
            break
        numbers = {name: value for name, value in entry.items() if type(value) in (int, float)}
        found = {name: value for name, value in numbers.items() if name not in NO_METRICS} | found
    if trainer.args.metric_for_best_model is not None:
        found[BEST] = float(step if trainer.state.best_global_step == step else 0)
    return found
