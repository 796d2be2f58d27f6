"""What a DeepSpeedEngine holds, as a training state."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

from tenuto.errors import MissingExtra, StateError, UsageError, install
from tenuto.events import warn
from tenuto.integrations.deepspeed.partitions import (
    FLAT,
    OptimizerState,
    Piece,
    own_run,
    partitions,
    pieces,
    shape_of,
)
from tenuto.state.declarations import first_rank, flat

TESTED: Final = frozenset({(0, 19)})
"""The versions of DeepSpeed that the tests run with."""
COUNTERS: Final = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
NEEDED: Final = (*COUNTERS, "module", "optimizer", "lr_scheduler", "gradient_accumulation_steps")
SCALER: Final = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""The attributes of DeepSpeed's loss scaler that training changes."""
ELSEWHERE: Final[tuple[tuple[str, Callable[[Any], bool]], ...]] = (
    ("pipeline parallelism", lambda engine: type(engine).__name__ == "PipelineEngine"),
    ("mixture of experts", lambda engine: bool(engine.has_moe_layers)),
    ("tensor parallelism", lambda engine: engine.mp_world_size > 1),
    ("offload to NVMe", lambda engine: bool(getattr(engine.optimizer, "swap_optimizer", False))),
    ("ZenFlow", lambda engine: bool(getattr(engine.optimizer, "zenflow", False))),
    ("ZeRO++", lambda engine: engine.zero_hpz_partition_size() > 1 or bool(engine.zero_quantized_weights())),
    ("curriculum learning", lambda engine: bool(engine.curriculum_learning_enabled())),
    ("random layerwise token dropping", lambda engine: bool(engine.random_ltd_enabled())),
)
"""What has state elsewhere than it is looked for here, each with how it is told."""


def state(engine: Any) -> dict[str, Any]:
    """Returns what a DeepSpeedEngine holds as the state of a Checkpointer, for ZeRO stages 1, 2 and 3 (and 0 in
    float32):

    - `model`: the master weights by the module's own names, frozen parameters, and buffers, of which the first rank's
      count, as in DeepSpeed's own files.
    - `optimizer`: its state by the names of parameters, such as `optimizer/exp_avg/layer.weight`.
    - `scheduler`: `engine.lr_scheduler`, where there is one.
    - `engine`: counters, options of the groups of parameters, loss scale.

    Partitions are declared as parts of the whole tensors: a checkpoint of any number of ranks restores on any other,
    also under another stage. The weights with which the module computes are made from the master weights then. Call it
    on every rank, after `deepspeed.initialize`.

    A step has to end where the engine updates: inside an accumulation a save raises StateError, since DeepSpeed's
    gradients are not in it. Raises UsageError for what is no engine, and for what keeps its state elsewhere (pipelines,
    experts, tensor parallelism, NVMe, ZeRO++).
    """
    _check(engine)
    found: dict[str, Any] = {}
    if engine.zero_optimization_stage() == 0:
        found |= {"model": engine.module, "optimizer": engine.optimizer}
        kept = None
    else:
        kept = OptimizerState(engine.optimizer)
        each = pieces(engine)
        found |= {"model": _model(engine, each), "optimizer": {}}
        follow(found["optimizer"], kept, each, engine.optimizer.optimizer)
    if engine.lr_scheduler is not None:
        found["scheduler"] = engine.lr_scheduler
    found["engine"] = EngineState(engine, kept)
    return found


def _model(engine: Any, each: list[Piece]) -> dict[str, Any]:
    flats = partitions(engine.optimizer)
    found: dict[str, Any] = {one.name: one.of(flats[one.partition]) for one in each}
    for name, parameter in engine.module.named_parameters():
        if name not in found:
            found[name] = _frozen(parameter)
    known = {id(value): found[name] for name, value in engine.module.named_parameters()}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        found.setdefault(name, known[id(parameter)])
    kept = engine.module.state_dict(keep_vars=True).keys()
    found |= {name: first_rank(value) for name, value in engine.module.named_buffers() if name in kept}
    return found


def _frozen(parameter: Any) -> Any:
    """Returns a parameter that the optimizer does not update, or in ZeRO 3 the part that this rank has of it."""
    if not hasattr(parameter, "ds_tensor"):
        return parameter.detach()
    begin, length = own_run(parameter)
    return flat(parameter.ds_tensor.detach().narrow(0, 0, length), whole=shape_of(parameter), begin=begin)


def follow(entry: dict[str, Any], kept: OptimizerState, each: list[Piece], optimizer: Any) -> None:
    """Fills `entry` with the optimizer's state by kind and parameter, and again whenever its tensors are others."""
    seen: list[dict[str, int]] = []

    def fill() -> None:
        tensors = kept.tensors()
        now = [{key: value.data_ptr() for key, value in one.items()} for one in tensors]
        if now == seen:
            return
        seen[:] = now
        entry.clear()
        for kind in sorted({key for one in tensors for key in one}):
            entry[kind] = {
                one.name: one.of(tensors[one.partition][kind]) for one in each if kind in tensors[one.partition]
            }

    fill()
    optimizer.register_step_post_hook(lambda *_: fill())


class EngineState:
    """The entry `engine` of the state: what is counted and set beside the tensors."""

    def __init__(self, engine: Any, kept: OptimizerState | None) -> None:
        self._engine, self._kept = engine, kept

    def state_dict(self) -> dict[str, Any]:
        engine, kept = self._engine, self._kept
        over = engine.micro_steps % engine.gradient_accumulation_steps()
        if over:
            raise StateError(
                f"{over} of {engine.gradient_accumulation_steps()} batches of an update are accumulated, and "
                "DeepSpeed's gradients are not in a checkpoint",
                subject="engine",
                hint="end a step of the Checkpointer where engine.is_gradient_accumulation_boundary()",
            )
        found: dict[str, Any] = {"counters": {name: getattr(engine, name) for name in COUNTERS}}
        if kept is not None:
            found |= {"groups": kept.groups, "values": kept.values(), "scaler": self._scaler()}
            autocast = getattr(engine.optimizer, "torch_autocast_gradscaler", None)
            if autocast is not None:
                found["autocast_scaler"] = autocast.state_dict()
        return found

    def _scaler(self) -> dict[str, Any]:
        scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        return {name: getattr(scaler, name) for name in SCALER if hasattr(scaler, name)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Sets them, and then makes the weights that the module computes with: together with all other ranks."""
        for name, value in saved["counters"].items():
            setattr(self._engine, name, value)
        if self._kept is None:
            return
        optimizer = self._engine.optimizer
        self._kept.set_groups(saved["groups"])
        self._kept.set_values(saved["values"])
        for name, value in saved["scaler"].items():
            if hasattr(optimizer.loss_scaler, name):
                setattr(optimizer.loss_scaler, name, value)
        autocast = getattr(optimizer, "torch_autocast_gradscaler", None)
        if autocast is not None and "autocast_scaler" in saved:
            autocast.load_state_dict(saved["autocast_scaler"])
        _compute_weights(optimizer)


def _compute_weights(optimizer: Any) -> None:
    """Makes the module's weights of the master weights, as DeepSpeed does after an update."""
    if not hasattr(optimizer, FLAT[0]):
        optimizer.update_lp_params()
        return
    optimizer.checkpoint_event_prologue()
    for number in range(len(optimizer.fp32_partitioned_groups_flat)):
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
    optimizer.checkpoint_event_epilogue()


def _check(engine: Any) -> None:
    """Raises UsageError for what is no engine, or one whose state is not where it is looked for. Warns once of another
    version than the tested ones."""
    _warn_of_version()
    missing = [name for name in NEEDED if not hasattr(engine, name)]
    if missing:
        raise UsageError(
            f"{type(engine).__name__} has no {missing[0]}: this is not a DeepSpeedEngine, or one of another version",
            subject="engine",
            hint="pass the first that deepspeed.initialize(…) returns",
        )
    for what, is_there in ELSEWHERE:
        if is_there(engine):
            raise UsageError(
                f"with {what} DeepSpeed keeps the training state where Tenuto does not look",
                subject="engine",
                hint="save with engine.save_checkpoint(directory); `tenuto import` takes its weights in",
            )
    stage = engine.zero_optimization_stage()
    if stage == 0 and not hasattr(engine.optimizer, "state_dict"):
        raise UsageError("this engine has no optimizer", subject="engine", hint="pass engine.module as the state")
    if stage == 0 and hasattr(engine.optimizer, "optimizer"):
        raise UsageError(
            f"{type(engine.optimizer).__name__} keeps its master weights where Tenuto does not look",
            subject="engine",
            hint="with half precision use ZeRO: zero_optimization.stage 1, 2 or 3 in DeepSpeed's configuration",
        )


@cache
def _warn_of_version() -> None:
    try:
        version = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        raise MissingExtra("DeepSpeed is not installed", subject="deepspeed", hint=install("deepspeed")) from None
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) not in TESTED:
        tested = ", ".join(".".join(map(str, one)) for one in sorted(TESTED))
        warn(f"DeepSpeed {version} was not tested with this version of Tenuto (tested: {tested})")
