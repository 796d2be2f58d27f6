"""The versions of transformers that this was tested with, and the private names of its Trainer that are used, each
looked up once."""

from __future__ import annotations

import importlib
from typing import Any, Final

from tenuto.errors import MissingExtra, UsageError, install
from tenuto.events import warn

TESTED: Final = ((5, 22), (5, 23))
"""The oldest and the newest minor version that the tests were run with."""

METHODS: Final = (
    "train",
    "get_batch_samples",
    "_finalize_training",
    "_init_training_state",
    "_load_best_model",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_load_scaler",
    "_maybe_log_save_evaluate",
    "_prepare_for_training",
    "_run_epoch",
    "_save_checkpoint",
)
"""Methods of a Trainer that are taken over."""

_checked: list[str] = []


def package() -> Any:
    """Returns the package `transformers`. Raises MissingExtra without it; warns once of an untested version."""
    try:
        found = importlib.import_module("transformers")
        importlib.import_module("accelerate")
    except ImportError as error:
        raise MissingExtra(
            f"tenuto.transformers needs transformers and accelerate: {error}",
            subject="transformers",
            hint=install("transformers"),
        ) from error
    version = str(found.__version__)
    if version not in _checked:
        _checked.append(version)
        oldest, newest = (".".join(map(str, one)) for one in TESTED)
        if not TESTED[0] <= _minor(version) <= TESTED[1]:
            warn(
                f"transformers {version} is not one of the versions that tenuto.transformers was tested with ({oldest} "
                f"to {newest}): run `tenuto certify` on the script before relying on it"
            )
    return found


def _minor(version: str) -> tuple[int, int]:
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)


def check(trainer: Any) -> None:
    """Raises UsageError if `trainer` is no Trainer, or one that lacks what is taken over."""
    transformers = package()
    if not isinstance(trainer, transformers.Trainer):
        raise UsageError(
            f"{type(trainer).__name__} is not a Trainer of transformers",
            subject="trainer",
            hint="tenuto.transformers.attach(trainer, …) takes a Trainer; a loop of your own a tenuto.Checkpointer",
        )
    missing = [name for name in METHODS if not callable(getattr(trainer, name, None))]
    if missing:
        raise UsageError(
            f"the Trainer of transformers {transformers.__version__} has no {', '.join(missing)}",
            subject="trainer",
            hint=f"pip install 'transformers>={'.'.join(map(str, TESTED[0]))}'",
        )
