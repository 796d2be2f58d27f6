"""The state of other callbacks: Keras's have none that can be saved, so a table says which attributes it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import keras

from tenuto.events import warn
from tenuto.state.frameworks import is_stateful

ATTRIBUTES: Final[Mapping[str, tuple[str, ...]]] = {
    "EarlyStopping": ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
    "ModelCheckpoint": ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    "SwapEMAWeights": ("_ema_weights_in_model",),
    "TensorBoard": ("_global_train_batch", "_global_test_batch"),
    "History": ("epoch", "history"),
}
"""What changes while `fit` runs, by the class of Keras. All else is how they were made, and stays as the script says:
`ReduceLROnPlateau.min_delta` would be negated once more."""
STATELESS: Final = frozenset(
    {"LearningRateScheduler", "TerminateOnNaN", "LambdaCallback", "ProgbarLogger", "RemoteMonitor", "CSVLogger"}
    | {"BackupAndRestore", "OrbaxCheckpoint", "CallbackList"}
)


def _known(callback: Any) -> str | None:
    """Returns the class of Keras that it is, or derives from."""
    for kind in type(callback).__mro__:
        if kind.__module__.partition(".")[0] == "keras" and (kind.__name__ in ATTRIBUTES or kind.__name__ in STATELESS):
            return kind.__name__
    return None


def _named(callbacks: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    seen: dict[str, int] = {}
    for callback in callbacks:
        name = type(callback).__name__
        seen[name] = seen.get(name, 0) + 1
        yield (name if seen[name] == 1 else f"{name}#{seen[name]}"), callback


def _attributes(callback: Any) -> list[str]:
    return [name for name in ATTRIBUTES.get(_known(callback) or "", ()) if hasattr(callback, name)]


def left_out(callbacks: Iterable[Any]) -> list[str]:
    """Returns the callbacks that may have a state which nothing saves: classes of the user's with attributes of their
    own, and without `state_dict`."""
    base = set(vars(keras.callbacks.Callback()))
    found = []
    for name, callback in _named(callbacks):
        known = _known(callback)
        own = type(callback).__module__.partition(".")[0] != "keras"
        if is_stateful(callback) or not own:
            continue
        if known is None and set(vars(callback)) > base:
            found.append(name)
    return found


class CallbackStates:
    """The other callbacks of one `fit`, as an entry of its state: by class, numbered where there are several."""

    def __init__(self, callbacks: Iterable[Any]) -> None:
        self._callbacks = dict(_named(callbacks))

    def state_dict(self) -> dict[str, Any]:
        found = {}
        for name, callback in self._callbacks.items():
            if is_stateful(callback):
                found[name] = callback.state_dict()
            elif attributes := _attributes(callback):
                found[name] = {one: _plain(getattr(callback, one)) for one in attributes}
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, saved in state.items():
            callback = self._callbacks.get(name)
            if callback is None:
                warn(f"the checkpoint has the state of a {name}, which fit was not given: it is left out")
            elif is_stateful(callback):
                callback.load_state_dict(saved)
            else:
                for one in _attributes(callback):
                    if one in saved:
                        setattr(callback, one, saved[one])
        new = [name for name, callback in self._callbacks.items() if name not in state and _attributes(callback)]
        if new:
            warn(f"the checkpoint has no state of {', '.join(new)}: it starts again")


def _plain(value: Any) -> Any:
    """Returns a copy that later epochs do not change."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value
