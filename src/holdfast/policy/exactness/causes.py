"""What a first difference points to. Words for a person: likely causes, and what to do about each.

The order of asking is that of one step: data arrives, generators are drawn from, the state is updated. Whatever differs
first explains what differs after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from holdfast.model.trail import Trail
from holdfast.policy.exactness.differences import Difference

SEED: Final = "seed every generator before anything is made: random.seed, numpy.random.seed, torch.manual_seed"
ADD: Final = "put it into `state`: anything with state_dict and load_state_dict, a generator, a plain value"


@dataclass(frozen=True, slots=True)
class Cause:
    """`name` is for machines, `words` and `advice` for people."""

    name: str
    words: str
    advice: tuple[str, ...] = ()


def of_training(difference: Difference, whole: Trail, unseeded: tuple[str, ...]) -> Cause:
    """Two uninterrupted runs differ; `unseeded` are generators that may be why."""
    if unseeded:
        names = " and ".join(unseeded)
        return Cause("unseeded", f"the random generators of {names} begin in another state in each run", (SEED,))
    if difference.start:
        return Cause(
            "unseeded start",
            "two runs began with different values, and with the global generators in the same state: what differs was "
            "made before seeding, or from a generator of its own that nobody has seeded",
            (SEED,),
        )
    if difference.of("data"):
        return Cause(
            "data order",
            "two uninterrupted runs went through the data differently",
            ("let the loader's order follow from a seed", SEED),
        )
    if difference.of("batches"):
        return Cause(
            "unseeded data",
            "the same place in the data gave other contents, with every generator that Holdfast knows in the same "
            "state: the data was made before seeding, or comes from a generator of its own that nobody has seeded, or "
            "from a clock",
            ("draw from the global generators, or seed that generator", "loader workers have generators of their own"),
        )
    if difference.of("random"):
        return Cause(
            "random draws",
            "from the same beginning, the generators were drawn from differently: something seeds them from a clock or "
            "draws a number of times that changes from run to run",
            (SEED,),
        )
    return Cause(
        "nondeterministic step",
        "the same data and the same generators gave another result: a kernel that adds in changing order, a generator "
        "of the step's own that nobody has seeded, a clock, or the order of a set of strings" + _batches_unseen(whole),
        _deterministic(whole),
    )


def of_chance(difference: Difference) -> Cause:
    """Two uninterrupted runs agree, and the one that was to be killed differed from them before it was."""
    return Cause(
        "now and then",
        "it differed before it was killed, while two uninterrupted runs were equal: the training does not always "
        f"repeat itself, or taking a checkpoint changes it (the state_dict of what holds {difference.first.path})",
        ("certify again: a difference that moves is one that comes by chance",),
    )


def no_resume(reached: int) -> Cause:
    return Cause(
        "no resume",
        f"the new process did not resume: it began from step 0, though a checkpoint of step {reached - 1} or before "
        "was there",
        (
            'build the Checkpointer with resume_from="latest"',
            "a loop of your own calls ckpt.restore() first",
        ),
    )


def of_resume(difference: Difference, resumed: Trail) -> Cause:
    """Uninterrupted runs agree, and the resumed one differs."""
    if difference.start and (difference.of("state") or not difference.of("data")):
        return _of_restore(difference)
    if difference.of("data"):
        reasons = [str(one) for one in resumed.certificate.get("reasons", ())]
        return Cause(
            "data position",
            "the resumed run was somewhere else in the data: the loader cannot be put back to where it was",
            (*reasons, "a DataLoader, a StatefulDataLoader or anything with state_dict and load_state_dict can be"),
        )
    if difference.of("batches"):
        return Cause(
            "data contents",
            "the resumed run was in the same place in the data and got other contents: the data set draws from a "
            "generator of its own, or changes as it is read",
            ("draw from the global generators, or put the generator into `state`",),
        )
    if difference.of("random"):
        return Cause(
            "random draws",
            "the generators were restored and then drawn from differently: something draws or seeds only when a "
            "process starts (a first evaluation, a warm-up), or only when it does not",
            ("do what draws before ckpt.restore() and ckpt.steps(), which put the generators back", *_quoted(resumed)),
        )
    return _of_hidden(difference, resumed)


def _of_restore(difference: Difference) -> Cause:
    first = difference.first
    return Cause(
        "restore",
        f"restoring did not bring back {first.path}: what its load_state_dict takes is not all that its state_dict "
        "gives, or something changed it as it was loaded",
        ("compare what state_dict gives before saving and after loading",),
    )


def _of_hidden(difference: Difference, resumed: Trail) -> Cause:
    paths = [one.path for one in difference.of("state")]
    if paths and all(_is_rate(path) for path in paths):
        return Cause(
            "learning rate",
            f"only the learning rate differs ({paths[0]}): what sets it, a scheduler or a count of steps of your own, "
            "began anew",
            ("put the scheduler into `state`", *resumed.uncovered),
        )
    return Cause(
        "uncovered state",
        "everything was restored, the data and the generators were the same, and yet the step gave another result: it "
        "depends on something that is not in `state`, such as an average of weights, a counter, a scheduler, a "
        "generator of its own, or gradients that are not cleared" + _batches_unseen(resumed),
        (ADD, *resumed.uncovered, *_quoted(resumed)),
    )


def _is_rate(path: str) -> bool:
    parts = path.split("/")
    return "param_groups" in parts and parts[-1] in ("lr", "initial_lr")


def _batches_unseen(trail: Trail) -> str:
    """What could not be looked at: batches that did not go through `ckpt.batches`."""
    if any(batch is not None for row in trail.rows for batch in row.batches):
        return ""
    return " (the contents of the batches were not seen: pass data= and take them from ckpt.batches, and they are)"


def _deterministic(trail: Trail) -> tuple[str, ...]:
    settings = trail.certificate.get("settings", {})
    reasons = tuple(str(one) for one in trail.certificate.get("reasons", ()))
    if "deterministic_algorithms" not in settings or settings["deterministic_algorithms"]:
        return reasons
    return (*reasons, "torch.use_deterministic_algorithms(True) raises where torch has no deterministic kernel")


def _quoted(trail: Trail) -> tuple[str, ...]:
    """The certificate's own words on what it cannot see."""
    caveats = tuple(f"the certificate says: {one}" for one in trail.certificate.get("caveats", ()))
    left = ", ".join(str(one) for one in trail.certificate.get("leaves_out", ()))
    return (*caveats, f"the certificate leaves out: {left}") if left else caveats
