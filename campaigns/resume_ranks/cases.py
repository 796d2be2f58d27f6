"""Which trainings of several ranks are tried, and how their jobs end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from campaigns.exact_resume.cases import End

Wrapper = Literal["ddp", "fsdp2"]
WRAPPERS: Final[tuple[Wrapper, ...]] = ("ddp", "fsdp2")
SAVE_EVERY: Final = 2
STEP_SAMPLES: Final = 12
"""What all ranks together take in a step, however many they are."""
STEPS: Final = 13
SAMPLES: Final = 50
"""Four steps and two samples an epoch: they do not divide among two ranks' batches, nor among three or four ranks."""


@dataclass(frozen=True)
class Case:
    """One training. `worlds`: of each life of the job its number of ranks, of which the first is that of the training
    that nobody interrupts; `ends`: how each but the last ends. `wrong`: what a control breaks in all lives but the
    first."""

    worlds: tuple[int, ...]
    ends: tuple[End, ...]
    wrapper: Wrapper = "ddp"
    loader: Literal["plain", "workers", "stateful", "in order", "the rest left out"] = "plain"
    streams: Literal["alike", "of each rank"] = "of each rank"
    dropout: bool = True
    epochs: bool = False
    repacked: bool = False
    wrong: str = ""

    @property
    def same_ranks(self) -> bool:
        return len(set(self.worlds)) == 1

    @property
    def repeats(self) -> bool:
        """Whether a step is the same on any number of ranks, but for rounding."""
        return not self.dropout and self.loader == "the rest left out"

    @property
    def kinds(self) -> dict[str, Any]:
        """What it is made of, for the result."""
        return {
            "ranks": " -> ".join(map(str, self.worlds)),
            "ends": [str(end) for end in self.ends],
            "wrapper": self.wrapper,
            "data": self.loader,
            "random streams": self.streams,
            "dropout": self.dropout,
            "loop": "epochs" if self.epochs else "steps",
            **({"between lives": "repacked, originals freed"} if self.repacked else {}),
            **({"wrong": self.wrong} if self.wrong else {}),
        }


INSIDE: Final = (End(3), End(7, "killed"))
"""Within the first epoch, and within the second one: what follows goes on from steps 3 and 6."""
EDGES: Final = (End(5), End(11, "killed"))
"""At an epoch's end, and at the end of the next one: from steps 5 and 10."""
WORLDS: Final = (4, 2, 3)

REPEATS: Final[dict[str, Any]] = {"loader": "the rest left out", "dropout": False}
"""Nothing is random in a step, and no sample comes twice: ends on other ranks agree but for rounding."""

QUICK: Final[dict[str, Case]] = {
    "ddp, 1 rank, 3, 2": Case((1, 3, 2), INSIDE),
    "fsdp2, 4 ranks, 2, 3, nothing at random": Case(WORLDS, INSIDE, "fsdp2", **REPEATS),
    "fsdp2, 2 ranks again": Case((2, 2, 2), INSIDE, "fsdp2"),
    "fsdp2, 2 ranks again, repacked": Case((2, 2, 2), INSIDE, "fsdp2", repacked=True),
    "ddp, 2 ranks, 3, 1, repacked": Case((2, 3, 1), INSIDE, repacked=True),
}
"""Those that every test run tries."""


def _kinds(wrapper: Wrapper) -> dict[str, Case]:
    usual = Case(WORLDS, INSIDE, wrapper)
    return {
        "streams alike": replace(usual, streams="alike"),
        "at the edges of epochs": replace(usual, ends=EDGES),
        "workers": replace(usual, loader="workers"),
        "stateful loader": replace(usual, loader="stateful"),
        "in order": replace(usual, loader="in order"),
        "the rest left out": replace(usual, loader="the rest left out"),
        "nothing at random": replace(usual, **REPEATS),
        "epochs": replace(usual, epochs=True),
    }


CASES: Final[dict[str, Case]] = {
    **QUICK,
    **{
        f"{wrapper}, 4 ranks again{' at the edges of epochs' * at_edges}": Case(
            (4, 4, 4), EDGES if at_edges else INSIDE, wrapper
        )
        for wrapper in WRAPPERS
        for at_edges in (False, True)
    },
    **{f"{wrapper}, 4 ranks, 2, 3, {name}": case for wrapper in WRAPPERS for name, case in _kinds(wrapper).items()},
    "ddp, 4 ranks, 2, 3": Case(WORLDS, INSIDE),
    "ddp, 2 ranks, 4, 3": Case((2, 4, 3), INSIDE),
    "ddp, 3 ranks, 1, 4, nothing at random": Case((3, 1, 4), INSIDE, **REPEATS),
    "fsdp2, 2 ranks, 4, 3": Case((2, 4, 3), EDGES, "fsdp2"),
    "fsdp2, 3 ranks, 2, 4, nothing at random": Case((3, 2, 4), INSIDE, "fsdp2", **REPEATS),
}
CURSOR, DATA, OPTIMIZER, BIT, RANDOM, BUCKETS = (
    "the cursor off by one",
    "the data outside the state",
    "the optimizer outside the state",
    "one bit of a restored tensor",
    "random generators left as they are",
    "buckets that torch lays anew",
)
CONTROLS: Final[dict[str, Case]] = {
    **{name: Case((3, 2), (End(3),), wrong=name) for name in (CURSOR, BIT)},
    **{name: Case(WORLDS, INSIDE, wrong=name) for name in (DATA, OPTIMIZER, RANDOM)},
    f"{CURSOR}, fsdp2": Case(WORLDS, INSIDE, "fsdp2", wrong=CURSOR),
    BUCKETS: Case((4, 4, 4), INSIDE, wrong=BUCKETS),
    "another step than the last": Case((2, 2), (End(3),), wrong="another step than the last"),
}
"""Jobs that do not go on as they have to: a judge that calls one of them right sees nothing."""
QUICK_CONTROLS: Final = (CURSOR,)
