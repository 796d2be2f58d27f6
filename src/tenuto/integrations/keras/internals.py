"""Everything of Keras that is not public, each looked up once. A Keras that lacks one is refused by name here, before
training begins."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, Final

from tenuto.errors import MissingExtra, UnsupportedPlatform, install
from tenuto.events import warn

try:
    import keras
except ImportError as error:
    raise MissingExtra("Keras is not installed", subject="keras", hint=install("keras")) from error

TESTED: Final = (3, 15)
"""The newest minor version that this was tested with."""
OLDEST: Final = (3, 12)


def version() -> tuple[int, int]:
    major, minor = keras.__version__.split(".")[:2]
    return int(major), int(minor)


def _find(module: str, name: str) -> Any:
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UnsupportedPlatform(
            f"Keras {keras.__version__} has no {module}.{name}, which Tenuto builds on",
            subject="keras",
            hint=f"pip install 'keras=={TESTED[0]}.{TESTED[1]}.*'",
        ) from error


if version()[0] != TESTED[0]:
    raise UnsupportedPlatform(
        f"tenuto.keras is for Keras 3, and this is Keras {keras.__version__}",
        subject="keras",
        hint=f"pip install 'keras=={TESTED[0]}.{TESTED[1]}.*'",
    )

PyDatasetAdapter: Final = _find("keras.src.trainers.data_adapters.py_dataset_adapter", "PyDatasetAdapter")
"""`fit` takes an object of it as it is, without shuffling it."""
_global_attribute: Final = _find("keras.src.backend.common.global_state", "get_global_attribute")
_global_seed_generator: Final = _find("keras.src.random.seed_generator", "global_seed_generator")
INITIAL_EPOCH: Final = "_initial_epoch"
"""The attribute of a model that says where `fit` begins, if `initial_epoch` was not given."""


def warn_of_version() -> None:
    if not OLDEST <= version() <= TESTED:
        oldest, newest = (".".join(map(str, one)) for one in (OLDEST, TESTED))
        warn(f"Keras {keras.__version__} is outside what tenuto.keras was tested with ({oldest} to {newest})")


def backend() -> str:
    return str(keras.backend.backend())


def synced(model: Any) -> Any:
    """Returns the model with its variables up to date: on jax, `fit` keeps their values to itself between two epochs
    until somebody asks a callback for its model."""
    sync = getattr(model, "jax_state_sync", None)
    if sync is not None and backend() == "jax":
        sync()
    return model


def global_seed() -> Any:
    """Returns the variable of Keras's global seed generator; None if nothing has asked for a seed yet."""
    if _global_attribute("global_seed_generator") is None:
        return None
    return _global_seed_generator().state


def make_global_seed() -> Any:
    """Returns that variable, which is made where there is none. Making it draws from Python's generator."""
    return _global_seed_generator().state


def build_symbolically(model: Any, batch: Any) -> None:
    """Makes the variables of a model, of its metrics and of its optimizer, as `fit` does on jax and torch; on
    TensorFlow it does so only inside the first step, which is too late to fill them."""
    model._symbolic_build(data_batch=batch)


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    setattr(model, INITIAL_EPOCH, epoch)


def callback_list() -> Any:
    """Returns the CallbackList whose `set_model` is calling the caller's caller. Nothing else tells a callback which
    others there are."""
    caller = sys._getframe(2).f_locals.get("self")
    return caller if isinstance(caller, keras.callbacks.CallbackList) else None
