"""Which Lightning the program uses, and what of it Tenuto needs: `lightning` and `pytorch_lightning` are the same code
under two names, and each knows only its own classes."""

from __future__ import annotations

import importlib
import inspect
import sys
from functools import cache
from types import ModuleType
from typing import Any, Final

from tenuto.errors import MissingExtra, UsageError, install
from tenuto.events import warn

PACKAGES: Final = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
"""The packages with a Trainer, each with the one that has its CheckpointIO."""

TESTED: Final = ("2.6",)

NEEDED: Final = (
    "_checkpoint_connector.dump_checkpoint",
    "_checkpoint_connector._loaded_checkpoint",
    "_logger_connector._callback_metrics",
    "_logger_connector._logged_metrics",
    "_logger_connector._progress_bar_metrics",
    "strategy.lightning_module_state_dict",
    "strategy.optimizer_state",
    "fit_loop.run",
    "fit_loop.done",
    "fit_loop.on_run_start",
    "fit_loop.on_advance_end",
    "fit_loop.on_run_end",
    "fit_loop._restarting",
    "fit_loop._load_combined_loader_states",
    "fit_loop.epoch_loop.done",
    "fit_loop.epoch_loop.on_run_start",
    "fit_loop.epoch_loop.on_advance_end",
    "fit_loop.epoch_loop._batches_that_stepped",
    "fit_loop.epoch_loop.val_loop.batch_progress.load_state_dict",
    "fit_loop.epoch_loop._results.update_metrics",
)
"""What is used of a Trainer besides its documented interface."""

RESUMING: Final = ("_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint")
"""Flags of a loop, in the versions that have them, by which it knows that it was restored."""


def public_class(name: str) -> type:
    """Returns the class of that name for every Lightning that the program has imported: a subclass of their base
    classes."""
    found = tuple(one for one in PACKAGES if one in sys.modules) or (_importable(name),)
    return _made(name, found)


def _importable(name: str) -> str:
    for package in PACKAGES:
        try:
            importlib.import_module(package)
        except ImportError:
            continue
        return package
    raise MissingExtra(
        f"tenuto.lightning.{name} needs Lightning, which is not installed",
        subject=name,
        hint=install("lightning"),
    )


@cache
def _made(name: str, packages: tuple[str, ...]) -> type:
    home, base = {
        "TenutoCheckpoint": ("callback", "callbacks.checkpoint.Checkpoint"),
        "TenutoCheckpointIO": ("checkpoint_io", "plugins.io.checkpoint_io.CheckpointIO"),
    }[name]
    ours: type = getattr(importlib.import_module(f"tenuto.integrations.lightning.{home}"), name)
    module, _, kind = base.rpartition(".")
    roots = packages if name == "TenutoCheckpoint" else [PACKAGES[one] for one in packages]
    bases = tuple(getattr(importlib.import_module(f"{root}.{module}"), kind) for root in roots)
    for package in packages:
        _warn_of_untested(sys.modules[package])
    return type(name, (ours, *bases), {"__doc__": ours.__doc__, "__module__": "tenuto.lightning"})


def _warn_of_untested(package: ModuleType) -> None:
    version = str(package.__version__)
    if not version.startswith(tuple(f"{one}." for one in TESTED)):
        warn(
            f"{package.__name__} {version} has not been tried with this version of Tenuto, only {', '.join(TESTED)}: "
            "`tenuto certify` shows whether a script resumes exactly"
        )


def check(trainer: Any) -> None:
    """Raises UsageError where this Lightning's Trainer lacks what is needed of it."""
    for name in NEEDED:
        found, where = trainer, "trainer"
        for part in name.split("."):
            if inspect.getattr_static(found, part, None) is None:  # properties are not asked: they may act
                package = next(base.__module__ for base in type(trainer).__mro__ if base.__name__ == "Trainer")
                version = getattr(sys.modules.get(package.partition(".")[0]), "__version__", "")
                raise UsageError(
                    f"this version of Lightning ({package.partition('.')[0]} {version}) has no {where}.{part}, which "
                    "TenutoCheckpoint needs to resume exactly",
                    subject=f"{where}.{part}",
                    hint=f"install a version that was tried: {', '.join(f'{one}.*' for one in TESTED)}",
                )
            where = f"{where}.{part}"
            if where.removeprefix("trainer.") != name:
                found = getattr(found, part)


def tuning(trainer: Any) -> bool:
    """Returns whether this fit is a Tuner's, which ends where training would begin."""
    return any(getattr(one, "_early_exit", False) for one in trainer.callbacks)


def overridden(hook: str, module: Any) -> bool:
    """Returns whether a LightningModule has its own `hook`."""
    base = next(kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule")
    return getattr(type(module), hook, None) is not getattr(base, hook, None)
