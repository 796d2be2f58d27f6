"""Which trainings are tried: each part in all its kinds beside the others' usual ones, and how their processes end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

from torch import nn

from campaigns.exact_resume import data, parts


@dataclass(frozen=True)
class End:
    """How a process ends: asked to stop after step `step`; or killed, or told to terminate, inside the step after."""

    step: int
    how: Literal["stopped", "killed", "terminated"] = "stopped"

    @property
    def goes_on_from(self) -> int:
        """The step that the next process has to go on from: whoever is killed saves nothing more, and who is told to
        terminate completes the step and saves it."""
        if self.how == "killed":
            return self.step // SAVE_EVERY * SAVE_EVERY
        return self.step + (self.how == "terminated")

    def __str__(self) -> str:
        return f"{self.how} {'after' if self.how == 'stopped' else 'in the step after'} step {self.step}"


SAVE_EVERY: Final = 3
USUAL_ENDS: Final = (End(4), End(8, "killed"), End(10, "terminated"))
"""Of 15 steps, six an epoch: it goes on within an epoch, at the beginning of the next one, and within that."""


@dataclass(frozen=True)
class Case:
    """One training. `epochs=0`: a loop over steps. `left_out`: what is wrongly not in the state, for a control."""

    loader: Callable[[], Any] = data.shuffled
    ends: Sequence[End] = USUAL_ENDS
    epochs: int = 0
    accumulate: int = 1
    steps: int = 15
    model: Callable[[], nn.Module] = parts.perceptron
    optimizer: str = "AdamW"
    scheduler: str = "cosine"
    generator: str | None = None
    average: Callable[[nn.Module], Any] | None = None
    scaler: bool = False
    micro_batches: int = 1
    fresh: bool = False
    """Each process is an interpreter of its own, instead of forked from one that has run none of torch."""
    keeps_gradients: bool = False
    """Every second step leaves its gradients for the next one to add to: part of no state, so of a control alone."""
    left_out: frozenset[str] = field(default_factory=frozenset)

    @property
    def kinds(self) -> dict[str, Any]:
        """What it is made of, for the result."""
        loop = f"{self.epochs} epochs, {self.accumulate} batches a step" if self.epochs else f"{self.steps} steps"
        found: dict[str, Any] = {
            "loop": loop,
            "data": _words(self.loader),
            "model": self.model.__name__,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "generator": self.generator,
            "average": self.average.__name__ if self.average else None,
            "scaler": self.scaler or None,
            "batches a step": self.micro_batches if self.micro_batches > 1 else None,
            "left out of the state": sorted(self.left_out) or None,
        }
        return {name: value for name, value in found.items() if value is not None}


def _words(loader: Callable[[], Any]) -> str:
    if isinstance(loader, partial):
        return ", ".join([loader.func.__name__, *(f"{name}={value}" for name, value in loader.keywords.items())])
    return loader.__name__


def stops(*steps: int) -> tuple[End, ...]:
    return tuple(End(step) for step in steps)


EPOCHS: Final[dict[str, Any]] = {"epochs": 3}
QUICK: Final[dict[str, Case]] = {
    "steps, in process": Case(ends=stops(4, 6, 7, 12)),
    "steps, generator of the loader": Case(data.own_generator, stops(5, 6, 13)),
    "steps, our sampler": Case(data.our_sampler, stops(4, 6, 7)),
    "steps, 2 workers": Case(partial(data.shuffled, num_workers=2), stops(4, 6, 13)),
    "steps, stateful loader": Case(data.stateful, stops(4, 6, 7, 12)),
    "steps, stateful loader with 2 workers": Case(partial(data.stateful, num_workers=2), stops(4, 6, 13)),
    "epochs, in process": Case(ends=stops(4, 6, 7, 17), **EPOCHS),
    "epochs, accumulate": Case(ends=stops(1, 2, 3, 4), accumulate=4, **EPOCHS),
    "epochs, 2 workers": Case(partial(data.shuffled, num_workers=2), stops(4, 12), **EPOCHS),
    "epochs, stateful loader": Case(data.stateful, stops(4, 6, 7), **EPOCHS),
    "stopped, killed, terminated": Case(),
}
"""Those that every test run tries."""

LOADERS: Final[dict[str, Callable[[], Any]]] = {
    "in order": data.in_order,
    "the last batch left out": partial(data.shuffled, drop_last=True),
    "4 batches fetched ahead": partial(data.shuffled, num_workers=2, prefetch_factor=4),
    "weighted": data.weighted,
    "subset": data.subset,
    "distributed sampler": data.distributed,
    "batch sampler": data.batch_sampler,
    "a stream with its own state": data.stream,
    "a list of batches": data.listed,
    "stateful loader, 4 batches fetched ahead": partial(data.stateful, num_workers=2, prefetch_factor=4),
    "stateful loader, a snapshot every third step": partial(data.stateful, num_workers=2, snapshot_every_n_steps=3),
}
CASES: Final[dict[str, Case]] = {
    **QUICK,
    "steps, every step": Case(ends=stops(*range(1, 15))),
    "steps, with replacement": Case(data.with_replacement, stops(4, 6, 7)),
    "steps, generator of the loader, whole batches": Case(data.own_generator_whole_batches, stops(4, 5, 10)),
    "epochs, generator of the loader, whole batches": Case(data.own_generator_whole_batches, stops(5, 6, 10), **EPOCHS),
    "steps, generator of the loader, the last batch left out": Case(
        partial(data.own_generator, drop_last=True), stops(4, 5, 10)
    ),
    "steps, persistent workers": Case(partial(data.shuffled, num_workers=2, persistent_workers=True), stops(4, 6, 13)),
    "killed every third step": Case(ends=tuple(End(step, "killed") for step in (4, 7, 10, 13))),
    "epochs, stopped, killed, terminated": Case(**EPOCHS),
    "interpreters of their own": Case(fresh=True),
    "interpreters of their own, epochs and workers": Case(partial(data.shuffled, num_workers=2), fresh=True, **EPOCHS),
    "two batches a step": Case(micro_batches=2),
    **{f"data: {name}": Case(loader) for name, loader in LOADERS.items()},
    **{
        f"model: {model.__name__}": Case(model=model)
        for model in (
            parts.convolution,
            parts.Recurrent,
            parts.Transformer,
            parts.spectral,
            parts.half_frozen,
            parts.in_bfloat16,
        )
    },
    **{
        f"optimizer: {name}": Case(
            optimizer=name,
            model=parts.sparse if name == "SparseAdam" else parts.perceptron,
            scheduler="steps" if name == "AdamW, lr a tensor" else "cosine",
        )
        for name in parts.OPTIMIZERS
        if name != "AdamW"
    },
    **{f"scheduler: {name}": Case(scheduler=name) for name in parts.SCHEDULERS if name != "cosine"},
    **{f"generator: {name}": Case(generator=name) for name in parts.GENERATORS},
    "average: of all steps": Case(average=parts.averaged),
    "average: moving": Case(average=parts.moving_average),
    "average: moving, epochs": Case(average=parts.moving_average, **EPOCHS),
    "gradient scaler": Case(scaler=True),
    "gradient scaler, everything else too": Case(
        partial(data.stateful, num_workers=2),
        scaler=True,
        average=parts.moving_average,
        generator="torch.Generator",
        scheduler="warm-up, then cosine",
        optimizer="AdamW, two groups",
        fresh=True,
    ),
}

CONTROLS: Final[dict[str, Case]] = {
    "a generator outside the state": Case(generator="random.Random", ends=stops(4), left_out=frozenset({"generator"})),
    "the data outside the state": Case(left_out=frozenset({"data"})),
    "the optimizer outside the state": Case(left_out=frozenset({"optimizer"})),
    "the scheduler outside the state": Case(left_out=frozenset({"scheduler"})),
    "the average outside the state": Case(average=parts.moving_average, ends=stops(4), left_out=frozenset({"average"})),
    "the gradient scaler outside the state": Case(scaler=True, left_out=frozenset({"scaler"})),
    "a sampler that nobody can put back": Case(data.own_order),
    "gradients kept from one step to the next": Case(keeps_gradients=True, ends=stops(3)),
}
"""Trainings that do not resume exactly: a comparison that calls one of them equal sees nothing."""
