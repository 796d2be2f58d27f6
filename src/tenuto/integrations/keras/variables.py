"""Keras variables as arrays by name, whatever the backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np

from tenuto.errors import StateMismatch
from tenuto.integrations.keras import internals

_MOST_NAMED: Final = 4


def by_name(variables: Iterable[Any]) -> dict[str, Any]:
    """Returns variables by their paths; those of one path are numbered in their order."""
    found: dict[str, Any] = {}
    for variable in variables:
        name = path = str(variable.path)
        number = 1
        while name in found:
            number += 1
            name = f"{path}#{number}"
        found[name] = variable
    return found


def host_array(variable: Any) -> Any:
    """Returns the value as an array, without a copy where the backend has it in host memory (on TensorFlow, one copy);
    torch's tensors on a device and those of bfloat16 as they are."""
    value = variable.value
    if internals.backend() != "torch":
        return np.asarray(value)
    tensor = value.detach()
    return tensor if tensor.device.type != "cpu" or tensor.dtype.itemsize == 2 else tensor.numpy()


def host_value(saved: Any) -> Any:
    """Returns what was saved in a form that every backend assigns."""
    if internals.backend() != "torch" and hasattr(saved, "detach"):
        return np.asarray(saved.detach().float().cpu() if saved.dtype.itemsize == 2 else saved.detach().cpu())
    return saved


def check_names(what: str, saved: Mapping[str, Any], variables: Mapping[str, Any]) -> None:
    """Raises StateMismatch, naming variables, where those of the checkpoint are not those that are there."""
    wrong = [f"{name} is not in the checkpoint" for name in variables if name not in saved]
    wrong += [f"{name} is in the checkpoint alone" for name in saved if name not in variables]
    for name, variable in variables.items():
        if name in saved and tuple(saved[name].shape) != tuple(variable.shape):
            wrong.append(
                f"{name} has the shape {list(saved[name].shape)} in the checkpoint, not {list(variable.shape)}"
            )
    if wrong:
        more = f", and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        raise StateMismatch(
            f"{what}: {'; '.join(wrong[:_MOST_NAMED])}{more}",
            subject=what,
            hint="build the same model with the same optimizer as the run that saved it; Keras numbers layers without "
            "a name in the order in which a process makes them",
        )


class Variables:
    """The variables that a function returns, as an entry of a state: arrays by name."""

    def __init__(self, what: str, variables: Callable[[], Iterable[Any]]) -> None:
        self._what = what
        self._variables = variables

    def state_dict(self) -> dict[str, Any]:
        return {name: host_array(variable) for name, variable in by_name(self._variables()).items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        variables = by_name(self._variables())
        check_names(self._what, state, variables)
        for name, variable in variables.items():
            variable.assign(host_value(state[name]))


class MetricVariables(Variables):
    """Those of a model's metrics. `fit` resets them where an epoch begins, so they are kept until then."""

    _kept: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if self._kept is None else dict(self._kept)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kept = dict(state)

    def put_back(self, *, inside_epoch: bool) -> None:
        """Assigns what was loaded, inside an epoch; at the beginning of one, keeps what `fit` has reset."""
        kept, self._kept = self._kept, None
        if kept is not None and inside_epoch:
            super().load_state_dict(kept)


class GlobalSeed:
    """Keras's global seed generator, from which come seeds that nobody gave."""

    def state_dict(self) -> dict[str, Any]:
        seed = internals.global_seed()
        return {} if seed is None else {"state": host_array(seed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "state" in state:
            internals.make_global_seed().assign(host_value(state["state"]))


def weights(model: Any) -> Variables:
    """Returns a model's weights and seeds, without its metrics, as the entry "weights" of what `TenutoCheckpoint`
    saves: for `tenuto.load(where, into={"weights": tenuto.keras.weights(model)})`."""

    def of_model() -> list[Any]:
        metrics = {id(one) for one in internals.synced(model).metrics_variables}
        return [one for one in [*model.trainable_variables, *model.non_trainable_variables] if id(one) not in metrics]

    return Variables("weights", of_model)
