"""What an Accelerator has prepared, as a training state."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Final

from tenuto.errors import MissingExtra, UsageError, install
from tenuto.events import warn
from tenuto.integrations.torch.meshes import is_dtensor
from tenuto.state.declarations import absent_layout, attach, first_rank, replicated_layout

TESTED: Final = frozenset({(1, 15)})
"""The versions of accelerate that the tests run with."""
NAMES: Final = {
    "models": "_models",
    "optimizers": "_optimizers",
    "schedulers": "_schedulers",
    "loaders": "_dataloaders",
    "registered": "_custom_objects",
    "save_hooks": "_save_model_state_pre_hook",
    "load_hooks": "_load_model_state_pre_hook",
}
"""The attributes of an Accelerator that are not public, and needed."""
UNKNOWN: Final = ("DEEPSPEED", "MEGATRON_LM", "XLA")
"""Kinds of distributed training whose state lies elsewhere than in what was prepared."""


def state(accelerator: Any) -> dict[str, Any]:
    """Returns what `accelerator.prepare` and `register_for_checkpointing` were given, as the state of a Checkpointer:
    `model`, `optimizer`, `scheduler` (a second one is `model_1`, …), `registered_0`, …, the scaler of mixed precision,
    and the count of accumulated batches. The entries are the objects themselves.

    Call it once all is prepared and registered. The position in the data is not among them: pass the prepared loader as
    `data=`.

    Raises UsageError if nothing was prepared, and where DeepSpeed, Megatron or XLA keeps the state elsewhere.
    """
    check(accelerator)
    found: dict[str, Any] = {}
    for name, plural in (("model", "models"), ("optimizer", "optimizers"), ("scheduler", "schedulers")):
        for number, value in enumerate(prepared(accelerator, plural)):
            found[f"{name}_{number}" if number else name] = value
    several = accelerator.num_processes > 1
    if several and accelerator.distributed_type.name.startswith("MULTI_"):
        _declare_replicas(prepared(accelerator, "models"), first=accelerator.process_index == 0)
    if not found:
        raise UsageError(
            "this Accelerator has prepared nothing yet",
            subject="accelerator",
            hint="call it after accelerator.prepare(model, optimizer, …)",
        )
    for number, value in enumerate(prepared(accelerator, "registered")):
        found[f"registered_{number}"] = first_rank(value) if several else value
    if accelerator.scaler is not None:
        found["scaler"] = accelerator.scaler
    found["accelerator"] = Accumulation(accelerator)
    return found


def _declare_replicas(models: Iterable[Any], *, first: bool) -> None:
    """Declares what DistributedDataParallel makes of the buffers, of which the first rank's count. An Accelerator keeps
    the modules without that wrapper around them."""
    for model in models:
        for buffer in model.buffers():
            if not is_dtensor(buffer):
                attach(buffer, replicated_layout(buffer.shape) if first else absent_layout(buffer.shape))


class Accumulation:
    """How many batches an Accelerator has accumulated since the last update, which it counts beside its objects."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._accelerator.step = state["step"]


def prepared(accelerator: Any, what: str) -> Any:
    return getattr(accelerator, NAMES[what])


def check(accelerator: Any) -> None:
    """Raises UsageError for what is no Accelerator, or one whose state is not where it is looked for. Warns once of
    another version than the tested ones."""
    warn_of_version()
    missing = [name for name in NAMES.values() if not hasattr(accelerator, name)]
    if missing:
        raise UsageError(
            f"{type(accelerator).__name__} has no {missing[0]}: this is not an Accelerator, or one of another version",
            subject="accelerator",
            hint="pass the accelerate.Accelerator; its save_state works without Tenuto",
        )
    kind = accelerator.distributed_type.name
    if kind in UNKNOWN:
        raise UsageError(
            f"with {kind} the training state is not in what accelerate prepared",
            subject="accelerator",
            hint="tenuto.deepspeed saves DeepSpeed's engine" if kind == "DEEPSPEED" else "use accelerate's save_state",
        )


@cache
def warn_of_version() -> None:
    try:
        version = importlib.metadata.version("accelerate")
    except importlib.metadata.PackageNotFoundError:
        raise MissingExtra("accelerate is not installed", subject="accelerate", hint=install("accelerate")) from None
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) not in TESTED:
        tested = ", ".join(".".join(map(str, one)) for one in sorted(TESTED))
        warn(f"accelerate {version} was not tested with this version of Tenuto (tested: {tested})")
