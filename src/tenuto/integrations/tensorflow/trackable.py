"""The variables below an object of TensorFlow's, by the names of the attributes that lead to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from tenuto.errors import MissingExtra, StateMismatch, install
from tenuto.events import warn

try:
    import tensorflow as tf
except ImportError as error:
    raise MissingExtra("TensorFlow is not installed", subject="tensorflow", hint=install("tensorflow")) from error

_MOST_NAMED: Final = 5
_SAVING: Final = ("_serialize_to_tensors", "_gather_saveables_for_checkpoint")
"""Methods that an object overrides which has a state of its own in TensorFlow's checkpoints."""


def _walk(root: Any) -> Iterator[tuple[str, Any]]:
    """Yields every object below `root` with its path; each once, by the shortest path."""
    view = tf.train.TrackableView(root)
    waiting: list[tuple[str, Any]] = [("", root)]
    seen = {id(root)}
    for path, one in waiting:
        yield path, one
        named = [(str(name).replace("/", "~1"), child) for name, child in view.children(one).items()]
        for name, child in (*_of_keras(one), *named):
            found = child.value if _is_keras_variable(child) else child
            if id(found) not in seen:
                seen.add(id(found))
                waiting.append((f"{path}/{name}" if path else name, found))


def _of_keras(one: Any) -> list[tuple[str, Any]]:
    """Returns the variables of a layer, model or optimizer of Keras 3, in its own order. Not all of them are below it
    for TensorFlow: the states of seeds are not."""
    found = getattr(one, "variables", None) if _is_keras(one) else None
    return [(f"variables/{number}", each) for number, each in enumerate(found if isinstance(found, list) else ())]


def _is_keras(value: Any) -> bool:
    return any(base.__module__.partition(".")[0] == "keras" for base in type(value).__mro__)


def _is_keras_variable(value: Any) -> bool:
    """Returns whether it is a variable of Keras 3, which holds one of TensorFlow."""
    return _is_keras(value) and isinstance(getattr(value, "value", None), tf.Variable)


def _has_other_state(value: Any) -> bool:
    """Returns whether TensorFlow saves something of it that is no variable, such as the entries of a table."""
    return not _is_variable(value) and any(
        getattr(type(value), name, None) is not getattr(tf.Module, name, None) for name in _SAVING
    )


def _is_variable(value: Any) -> bool:
    return isinstance(value, tf.Variable)


class Trackable:
    """What `trackable` returns: an entry of a state."""

    def __init__(self, root: Any, *, partial: bool = False) -> None:
        self._root = root
        self._partial = partial
        self.missing: tuple[str, ...] = ()
        """Variables that the last restore did not find in the checkpoint: `assert_existing_objects_matched`."""
        self.unused: tuple[str, ...] = ()
        """Names in that checkpoint that are no variable here: `assert_consumed`."""
        iterators = [path or "root" for path, one in _walk(root) if isinstance(one, tf.data.Iterator)]
        if iterators:
            warn(f"the state of tf.data iterators is not saved ({', '.join(iterators)}): they start again")
        others = [
            f"{path or 'root'} (a {type(one).__name__})"
            for path, one in _walk(root)
            if _has_other_state(one) and not isinstance(one, tf.data.Iterator)
        ]
        if others:
            warn(f"only variables are saved, and not the state of {_few(others)}")

    @property
    def variables(self) -> dict[str, Any]:
        return {path or "value": one for path, one in _walk(self._root) if _is_variable(one)}

    def state_dict(self) -> dict[str, Any]:
        return {path: np.asarray(one.numpy()) for path, one in self.variables.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        variables = self.variables
        self.missing = tuple(path for path in variables if path not in state)
        self.unused = tuple(path for path in state if path not in variables)
        wrong = [
            f"{path} has the shape {list(state[path].shape)} in the checkpoint, not {list(one.shape)}"
            for path, one in variables.items()
            if path in state and not one.shape.is_compatible_with(state[path].shape)
        ]
        names = [f"{one} is not in the checkpoint" for one in self.missing]
        names += [f"{one} is in the checkpoint alone" for one in self.unused]
        if wrong or (names and not self._partial):
            raise StateMismatch(
                f"the variables are not those that were saved: {_few([*wrong, *names])}",
                subject="variables",
                hint="create all variables first (an optimizer's by optimizer.build(variables)); "
                "tenuto.tensorflow.trackable(root, partial=True) takes what is there",
            )
        if names:
            warn(f"restored in part: {_few(names)}")
        for path, one in variables.items():
            if path in state:
                one.assign(state[path])


def trackable(root: Any, *, partial: bool = False) -> Trackable:
    """Returns an entry of a state for all variables below a `tf.train.Checkpoint`, `tf.Module`, model, optimizer or
    `tf.random.Generator`: `Checkpointer(where, {"train": tenuto.tensorflow.trackable(checkpoint)})`.

    Variables are named by the attributes that lead to them. A restore raises StateMismatch where names or shapes
    differ; with `partial`, it takes what fits by name, and warns of the rest. All variables have to exist: an
    optimizer makes its own in `build`. The state of `tf.data` iterators, and that of random ops without a Generator, is
    not saved.
    """
    return Trackable(root, partial=partial)


def _few(names: list[str]) -> str:
    more = f"; and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return "; ".join(names[:_MOST_NAMED]) + more
