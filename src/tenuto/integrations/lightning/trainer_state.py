"""What a Lightning checkpoint has besides model and optimizers: made by Lightning itself, kept as an entry of the
state, and given back to Lightning where it would have loaded a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch

from tenuto.engine.read.opened import Opened
from tenuto.errors import Unserialisable
from tenuto.events import warn
from tenuto.model.leaf import unescape
from tenuto.state.encode.flattener import flatten

ENTRY: Final = "lightning"
VALUES: Final = "values"
TENSORS: Final = "tensors"
TENSOR: Final = "#tensor"
"""The key of the dictionary that stands for a tensor among the values: its number."""

_TENSORS: Final = f"{ENTRY}/{TENSORS}/"
_MODEL: Final = "model/"

HPARAMS: Final = ("hyper_parameters", "datamodule_hyper_parameters")
HPARAMS_TYPE: Final = "hparams_type"
OURS: Final = "tenuto"


class TrainerState:
    """The entry `lightning` of the state: until training begins what was restored, then the Trainer's own state."""

    def __init__(self) -> None:
        self._trainer: Any = None
        self._loaded: Mapping[str, Any] = {VALUES: {}, TENSORS: []}
        self._hparams = Hparams()
        self.details: Callable[[], Mapping[str, Any]] = dict
        """Returns what the callback itself keeps."""

    def begin(self, trainer: Any) -> None:
        """Returns the Trainer's own state from now on."""
        self._trainer = trainer
        self._loaded = {}

    def state_dict(self) -> Mapping[str, Any]:
        if self._trainer is None:
            return self._loaded
        tensors: list[Any] = []
        values = _apart(self._dump(), tensors)
        return {VALUES: values, TENSORS: tensors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loaded = state

    def _dump(self) -> dict[str, Any]:
        """Returns Lightning's checkpoint without what the entries for model and optimizers hold."""
        trainer = self._trainer
        live: Mapping[str, Any] = trainer.lightning_module.state_dict()
        with _instead(trainer.strategy, lightning_module_state_dict=lambda: live, optimizer_state=lambda optimizer: {}):
            found: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        found.pop("optimizer_states", None)
        if found["state_dict"] is live and _same(live, trainer.lightning_module.state_dict()):
            del found["state_dict"]
        loops = found.get("loops", {}).get("fit_loop", {})
        loops.get("state_dict", {}).pop("combined_loader", None)  # the loaders' position is kept elsewhere
        return {**self._hparams.representable(found), OURS: dict(self.details())}


class Hparams:
    """Leaves out of Lightning's dictionary the hyper-parameters that cannot be saved, and names them once."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, dict[str, Any]]] = {}

    def representable(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        found = dict(checkpoint)
        for name in HPARAMS:
            if name in found:
                found[name] = self._kept(name, dict(found[name]))
        if not isinstance(found.get(HPARAMS_TYPE), str | None):
            found.pop(HPARAMS_TYPE)  # the class of OmegaConf's containers
        return found

    def _kept(self, name: str, hparams: dict[str, Any]) -> dict[str, Any]:
        mark = [(key, id(value)) for key, value in hparams.items()]
        if name in self._known and self._known[name][0] == mark:
            return self._known[name][1]
        kept, lost = {}, []
        for key, value in hparams.items():
            try:
                flatten({"value": value})
            except Unserialisable:
                lost.append(f"{key} (a {type(value).__name__})")
            else:
                kept[key] = value
        if lost and (name not in self._known or self._known[name][1].keys() != kept.keys()):
            warn(
                f"of the {name.replace('_', ' ')} {', '.join(lost)} cannot be saved: neither tensors nor plain values. "
                "Training resumes without them; load_from_checkpoint needs them as arguments"
            )
        self._known[name] = mark, kept
        return kept


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether no hook has replaced, added or removed an entry."""
    return one.keys() == other.keys() and all(_place(one[name]) == _place(other[name]) for name in one)


def _place(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and type(value).__name__ != "DTensor":
        return value.data_ptr(), value.shape, value.dtype
    return id(value) if not isinstance(value, torch.Tensor) else value.shape


@contextmanager
def _instead(owner: Any, **functions: Callable[..., Any]) -> Iterator[None]:
    """Has `owner` use these functions in place of its methods."""
    before = {name: owner.__dict__.get(name) for name in functions}
    vars(owner).update(functions)
    try:
        yield
    finally:
        for name, function in before.items():
            if function is None:
                del owner.__dict__[name]
            else:
                owner.__dict__[name] = function


def _apart(value: Any, tensors: list[Any]) -> Any:
    """Returns `value` with a number in place of each tensor, which `tensors` gets."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        tensors.append(_own(value.detach()) if isinstance(value, torch.Tensor) else value)
        return {TENSOR: len(tensors) - 1}
    if isinstance(value, Mapping):
        return {key: _apart(one, tensors) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_apart(one, tensors) for one in value)
    return value


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a scalar. Lightning keeps one tensor as a metric in several places, and after a resume one in
    each: what is saved is to be the same."""
    return tensor.clone() if tensor.dim() == 0 else tensor


def joined(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Lightning's dictionary from what `TrainerState.state_dict` returned."""
    found: dict[str, Any] = _with_tensors(state[VALUES], state[TENSORS].__getitem__)
    return found


def _with_tensors(value: Any, tensor: Callable[[int], Any]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {TENSOR}:
            return tensor(value[TENSOR])
        return {key: _with_tensors(one, tensor) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(one, tensor) for one in value)
    return value


class LoadedCheckpoint(dict[str, Any]):
    """Lightning's checkpoint as it would have been read from a file. The model's tensors are read when Lightning asks
    for them."""

    def __init__(self, opened: Opened) -> None:
        tensors = {int(path.rpartition("/")[2]): path for path in opened if path.startswith(_TENSORS)}
        values = _with_tensors(opened.plain(f"{ENTRY}/{VALUES}"), lambda number: opened[tensors[number]][...])
        self.details: Mapping[str, Any] = values.pop(OURS, {})
        super().__init__(values)
        self.setdefault("optimizer_states", [])  # restored in place, by their own entries
        self._opened = opened

    def __missing__(self, key: str) -> Any:
        if key != "state_dict":
            raise KeyError(key)
        names = [path for path in self._opened if path.startswith(_MODEL)]
        self[key] = {unescape(path.removeprefix(_MODEL)): self._opened[path].torch() for path in names}
        return self[key]
