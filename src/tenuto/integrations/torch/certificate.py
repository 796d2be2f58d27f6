"""torch's part of a certificate: settings that change the numbers of the same program, and module state outside any
state_dict."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from tenuto.integrations.torch import optimizer_steps
from tenuto.integrations.torch.data.iteration import loaders
from tenuto.integrations.torch.data.resumable import any_made, position_of
from tenuto.integrations.torch.gradients import Gradients
from tenuto.integrations.torch.wrappers import unsynchronised
from tenuto.state.frameworks import is_stateful
from tenuto.state.position.positions import DataPosition
from tenuto.training import snapshot as plain
from tenuto.training.snapshot import Findings

_apart: Final[weakref.WeakKeyDictionary[torch.nn.Module, list[str]]] = weakref.WeakKeyDictionary()
"""The names of buffers that nothing keeps equal on the ranks, by module."""
_MOST_OPTIMIZERS: Final = 64
_DEEPEST: Final = 3
"""Containers and wrappers around an optimizer, at most."""
_WITHOUT_OPTIMIZER: Final = (
    *(torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler),
    *(torch.amp.GradScaler, torch.utils.data.DataLoader),
)
"""Kinds whose state has no optimizer in it."""


def certificate(state: Mapping[str, Any], position: DataPosition | None) -> dict[str, Any]:
    """Returns the certificate of a training state, as `training.snapshot.certificate`."""
    return plain.certificate(state, position)


def findings(state: Mapping[str, Any]) -> Findings:
    """Reads flags only: touches no tensor, synchronises no device."""
    accelerated = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    reasons = tuple(_nondeterminism()) if accelerated else ()
    reasons += tuple(_changed_since_the_step(state))
    caveats = tuple(_unsaved(state))
    left_out = tuple(_optimizers_left_out(state))
    if any(map(_may_cover, state.values())):
        caveats += left_out
    else:
        reasons += left_out
    unknown: tuple[str, ...] = ()
    if not any(True for value in state.values() for _ in _optimizers(value)):
        if _trains_without_optimizer(state):
            unknown = ("a model is in the state and no optimizer is: what the optimizer keeps does not come back",)
        else:
            caveats += ("no torch optimizer is an entry of the state",)
    counting = [one for value in state.values() for one in loaders(value)] if any_made() else []
    positions = [found for one in counting if (found := position_of(one)) is not None]
    reasons += tuple(reason for one in positions for reason in one.reasons)
    caveats += tuple(caveat for one in positions for caveat in one.caveats)
    settings = {**_settings(), "accelerator": "cuda" if accelerated else None}
    versions = {"torch": str(torch.__version__), "cuda": torch.version.cuda}
    return Findings(reasons, caveats, settings, versions, unknown, any(one.exact for one in positions))


def _trains_without_optimizer(state: Mapping[str, Any]) -> bool:
    """Returns whether the state has parameters to train, and nothing that could hold their optimizer."""
    if any(map(_may_cover, state.values())) or any(True for value in state.values() for _ in _optimizers(value)):
        return False
    modules = (value for value in state.values() if isinstance(value, torch.nn.Module))
    return any(parameter.requires_grad for module in modules for parameter in module.parameters())


def _optimizers_left_out(state: Mapping[str, Any]) -> Iterator[str]:
    """Describes optimizers that are attributes of a module of the state, whose state_dict() leaves them out."""
    covered = {id(optimizer) for value in state.values() for optimizer in _optimizers(value)}
    for name, module in state.items():
        if isinstance(module, torch.nn.Module):
            for attribute, value in vars(module).items():
                # torch keeps tensors and submodules in dictionaries of its own; an optimizer is never among them
                if attribute not in ("_parameters", "_buffers", "_modules") and any(
                    id(optimizer) not in covered for optimizer in _optimizers(value)
                ):
                    yield f"{name}: its optimizer {name}.{attribute} is not an entry of the state, and is not saved"


def _optimizers(value: Any, depth: int = 0) -> Iterator[torch.optim.Optimizer]:
    """Yields the optimizers in a value. A large container, such as a vocabulary or a buffer of samples, holds none:
    training waits for this at every save."""
    if depth > _DEEPEST:
        return
    if isinstance(value, torch.optim.Optimizer):
        yield value
        # one that wraps another, as accelerate's
        yield from _optimizers(getattr(value, "optimizer", None), depth + 1)
    elif type(value) in (dict, list, tuple) and len(value) <= _MOST_OPTIMIZERS:
        for inner in value.values() if type(value) is dict else value:
            yield from _optimizers(inner, depth + 1)


def _may_cover(entry: Any) -> bool:
    """Returns whether an entry has a state of its own making, in which an optimizer may be."""
    return is_stateful(entry) and not isinstance(entry, _WITHOUT_OPTIMIZER)


def _nondeterminism() -> Iterator[str]:
    if not torch.are_deterministic_algorithms_enabled():
        yield "torch may choose non-deterministic kernels: torch.use_deterministic_algorithms is off"
    elif torch.is_deterministic_algorithms_warn_only_enabled():
        yield "torch may choose non-deterministic kernels: torch.use_deterministic_algorithms is on with warn_only=True"
    if torch.backends.cudnn.benchmark:
        yield "cudnn.benchmark is on, so each process chooses its convolution algorithms by timing them"


def _settings() -> dict[str, Any]:
    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
    }


def _unsaved(state: Mapping[str, Any]) -> Iterator[str]:
    for name, module in state.items():
        if not isinstance(module, torch.nn.Module):
            continue
        if _lays_buckets_anew(module):
            yield (
                f"{name}: DistributedDataParallel puts gradients into other buckets after a process's first step, so "
                "sums over more than two ranks add up in another order in it (find_unused_parameters=True keeps one)"
            )
        apart = _apart.get(module)
        if apart is None:  # once: this walks the whole module, and training waits for it at every save
            apart = _apart[module] = unsynchronised(module)
        if apart:
            more = f" and {len(apart) - 1} more" if len(apart) > 1 else ""
            yield (
                f"{name}: each rank may have its own buffers ({apart[0]}{more}): the first rank's are saved, and all "
                "ranks have them after a resume (SyncBatchNorm keeps running statistics alike)"
            )


def _changed_since_the_step(state: Mapping[str, Any]) -> Iterator[str]:
    """Describes gradients and weights that are not as the optimizers' latest steps left them."""
    saved = any(isinstance(value, Gradients) for value in state.values())
    entries = [one for value in state.values() if type(value) in (list, tuple) for one in value]
    entries += [one for value in state.values() if type(value) is dict for one in value.values()]
    own = {id(one) for one in entries if isinstance(one, torch.Tensor)}
    for name, value in state.items():
        for optimizer in _optimizers(value):
            if not saved and optimizer_steps.window_is_open(optimizer, own):
                yield (
                    f"{name}: gradients lie there that no step has used yet, as in an accumulation window, and they "
                    'are not saved: add "gradients": tenuto.torch.Gradients(model) to the state'
                )
            if optimizer_steps.weights_were_swapped(optimizer):
                yield (
                    f"{name}: its weights were changed since its latest step, as where averaged ones are swapped in "
                    "for an evaluation: what lies there now is saved and resumed"
                )


# -- compared at the resume

_MOST_NAMES: Final = 1000


def form(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what decides a step, is no value of the state, and can be looked at: which modules are in eval mode, of
    an entry that trains (one that is evaluated as a whole will train again), and which parameters are frozen; by entry.
    """
    found: dict[str, Any] = {}
    for name, module in state.items():
        if not isinstance(module, torch.nn.Module):
            continue
        own: dict[str, list[str]] = {"frozen": []}
        if module.training:  # names are made up only where there are any: training waits for this at every save
            own["eval"] = []
            if not all(one.training for one in module.modules()):
                own["eval"] = [inner for inner, one in module.named_modules() if not one.training][:_MOST_NAMES]
        if not all(one.requires_grad for one in module.parameters()):
            own["frozen"] = [inner for inner, one in module.named_parameters() if not one.requires_grad][:_MOST_NAMES]
        found[name] = own
    return found


def differences(state: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[str]:
    """Describes where the form of `state` is another than the `saved` one."""
    for name, here in form(state).items():
        there = saved.get(name)
        if not isinstance(there, Mapping):
            continue
        for key, words in (("eval", "in eval mode"), ("frozen", "frozen (requires_grad=False)")):
            if key not in there or key not in here:
                continue
            then, now = set(map(str, there[key])), set(here[key])
            for which, was in ((then - now, "was"), (now - then, "is")):
                if which:
                    first = min(which)
                    more = f" and {len(which) - 1} more" if len(which) > 1 else ""
                    other = "is not now" if was == "was" else "was not when it was saved"
                    yield f"{name}{'/' if first else ''}{first}{more} {was} {words}, and {other}"


def _lays_buckets_anew(module: torch.nn.Module) -> bool:
    """Returns whether the first step after a resume rounds sums differently than the same step without one."""
    wrapper = getattr(torch.nn.parallel, "DistributedDataParallel", None)
    if wrapper is None or not isinstance(module, wrapper) or torch.distributed.get_world_size(module.process_group) < 3:
        return False
    return not module.find_unused_parameters or module.static_graph
