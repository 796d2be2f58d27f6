"""The verdict on a resume: exact, inexact, or not to be judged because the training does not repeat itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import field, replace
from itertools import pairwise
from typing import Any, Final, Literal

from tenuto.record import record

# The trail of a training: its state step by step, by which two runs of one script are compared.


@record
class Row:
    """The state after a completed step (`start`: before the first one, as this process built or restored it).

    entries: the digest of each leaf and the spelling of each plain value, by path; those of this process alone are
        below `#private`.
    batches: a digest for each batch since the previous row; None for one that has no representation.
    """

    step: int
    epoch: int
    batch: int
    entries: Mapping[str, str]
    batches: tuple[str | None, ...] = ()
    start: bool = False

    def record(self) -> dict[str, Any]:
        """Returns the row as JSON."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "batch": self.batch,
            "entries": dict(self.entries),
            "batches": list(self.batches),
            "start": self.start,
        }

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Row:
        return cls(**{**record, "batches": tuple(record["batches"])})


@record
class Trail:
    """One process's rows in order, its certificate, state found outside `state`, and names of logged metrics.

    memory: whether the script keeps states in memory, which certify leaves out.
    script: the record of the script (`proof.CertifiedScript`), None where it is no file.
    """

    rows: tuple[Row, ...] = ()
    certificate: Mapping[str, Any] = field(default_factory=dict)
    uncovered: tuple[str, ...] = ()
    logged: tuple[str, ...] = ()
    memory: bool = False
    script: Mapping[str, Any] | None = None

    @property
    def began(self) -> int | None:
        """The step that it was restored to, 0 if to none; None if it has recorded nothing."""
        if not self.rows:
            return None
        return self.rows[0].step if self.rows[0].start else 0

    @property
    def reached(self) -> int:
        return self.rows[-1].step if self.rows else 0

    @property
    def batches_seen(self) -> bool:
        """Whether batches passed through `ckpt.batches`, and could be compared."""
        return any(batch is not None for row in self.rows for batch in row.batches)

    @property
    def uncounted(self) -> tuple[str, ...]:
        """The loaders that the script has iterated and nothing counts: no data= was given."""
        return tuple(map(str, self.certificate.get("uncounted", ())))

    def at(self, step: int) -> tuple[Row, ...]:
        """Returns the rows of one step: one, or two if the step ended an epoch."""
        return tuple(row for row in self.rows if row.step == step)


# The first difference of two trails.

Group = Literal["data", "batches", "random", "state"]
GROUPS: Final[tuple[Group, ...]] = ("data", "batches", "random", "state")
RANDOM: Final = "#private/random/"
EPOCH_RANDOM: Final = "#private/data/start/global/"
DATA: Final = "#private/data"


@record
class Differing:
    """One entry that differs; None: the entry is missing."""

    path: str
    one: str | None
    other: str | None


@record
class Difference:
    """The first row in which two trails differ. `start`: before the second run's first own step."""

    step: int
    start: bool
    found: Mapping[Group, tuple[Differing, ...]]

    def of(self, group: Group) -> tuple[Differing, ...]:
        return self.found.get(group, ())

    @property
    def first(self) -> Differing:
        """The first differing entry: of the state, else of the random generators, else of the data."""
        return next(found for group in reversed(GROUPS) for found in self.of(group))


def first_difference(one: Trail, other: Trail, ignoring: Set[str] = frozenset()) -> Difference | None:
    """Returns the first difference in a step that both have done, in the order of `other`; `ignoring`: names of
    generators."""
    last = min(one.reached, other.reached)
    for step in dict.fromkeys(row.step for row in other.rows):
        if step > last:
            return None
        theirs, ours = one.at(step), other.at(step)
        # A run ended between a step and its epoch's end has only the first of the two rows.
        for row, reference in zip(ours, theirs, strict=False):
            found = compare(reference, row, ignoring)
            if found:
                return Difference(step, row.start, found)
        if not theirs:
            return Difference(step, ours[0].start, {"data": (Differing("steps that were counted", None, str(step)),)})
    return None


def compare(one: Row, other: Row, ignoring: Set[str] = frozenset()) -> dict[Group, tuple[Differing, ...]]:
    """Returns what differs between two rows of one step, by group; empty if they are equal in every bit."""
    found: dict[Group, list[Differing]] = {group: [] for group in GROUPS}
    for name in ("epoch", "batch"):
        left, right = getattr(one, name), getattr(other, name)
        if left != right:
            found["data"].append(Differing(name, str(left), str(right)))
    if not (one.start or other.start) and one.batches != other.batches:
        found["batches"].append(Differing("batches", _shown(one.batches), _shown(other.batches)))
    for differing in _entries(one.entries, other.entries):
        if _generator(differing.path) not in ignoring:
            found[group_of(differing.path)].append(differing)
    return {group: tuple(entries) for group, entries in found.items() if entries}


def unseeded(one: Trail, other: Trail) -> frozenset[str]:
    """Returns the generators, such as "numpy", whose states differ at the start of two runs."""
    starts = [row for trail in (one, other) for row in trail.rows[:1] if row.start and row.step == 0]
    if len(starts) < 2:
        return frozenset()
    differing = (_generator(one.path) for one in _entries(starts[0].entries, starts[1].entries))
    return frozenset(name for name in differing if name)


def drawn_from(trail: Trail, step: int) -> frozenset[str]:
    """Returns the generators whose state changed in the steps up to this one."""
    rows = [row for row in trail.rows if row.step <= step]
    changed = (one.path for a, b in pairwise(rows) for one in _entries(a.entries, b.entries))
    return frozenset(_generator(path) for path in changed if path.startswith(RANDOM))


def _generator(path: str) -> str:
    """Returns the generator that an entry belongs to; "" for any other entry.

    A data position may hold the state that the generators had when its epoch began.
    """
    for beginning in (RANDOM, EPOCH_RANDOM):
        if path.startswith(beginning):
            return path[len(beginning) :].partition("/")[0]
    return ""


def group_of(path: str) -> Group:
    if path.startswith(RANDOM):
        return "random"
    if path.startswith(DATA):
        return "batches" if "/workers/" in path else "data"  # what a loader's workers draw is in the batches
    return "state"


def _entries(one: Mapping[str, str], other: Mapping[str, str]) -> Iterator[Differing]:
    for path in dict.fromkeys([*one, *other]):
        if one.get(path) != other.get(path):
            yield Differing(path, one.get(path), other.get(path))


def _shown(batches: tuple[str | None, ...]) -> str:
    return ", ".join(batch or "unknown" for batch in batches) or "none"


# Likely causes of a first difference, in words for people, with advice.
#
# The checks follow the order of a step: data arrives, generators are drawn from, the state is updated. What differs
# first explains what differs later.

SEED: Final = "seed every generator before anything is made: random.seed, numpy.random.seed, torch.manual_seed"
ADD: Final = "put it into `state`: anything with state_dict and load_state_dict, a generator, a plain value"


@record
class Cause:
    """A likely cause. `name` is for machines, `words` and `advice` for people."""

    name: str
    words: str
    advice: tuple[str, ...] = ()


def of_training(difference: Difference, trail: Trail, unseeded: tuple[str, ...]) -> Cause:
    """Explains a difference of two uninterrupted runs; `unseeded`: generators that may be the reason."""
    if unseeded:
        names = " and ".join(unseeded)
        return Cause("unseeded", f"the random generators of {names} begin in another state in each run", (SEED,))
    if difference.start:
        return Cause(
            "unseeded start",
            "two runs began with different values, and with the global generators in the same state: what differs was "
            "made before seeding, or from a generator of its own that is not seeded",
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
            "the same place in the data gave other contents, with every generator that Tenuto knows in the same "
            "state: the data was made before seeding, or comes from a generator of its own that is not seeded, or "
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
        "of the step's own that is not seeded, a clock, or the order of a set of strings" + _batches_unseen(trail),
        _deterministic(trail),
    )


def of_chance(difference: Difference) -> Cause:
    """Explains a run that differed before its kill, although two uninterrupted runs agree."""
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
    """Explains a resumed run that differs, although uninterrupted runs agree."""
    if difference.start and (difference.of("state") or not difference.of("data")):
        return _of_restore(difference)
    if resumed.uncounted:
        return _of_uncounted(difference, resumed)
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


def _of_uncounted(difference: Difference, resumed: Trail) -> Cause:
    """Explains what follows where a loader began anew: other batches, other draws for its order, another state."""
    hidden = _of_hidden(difference, resumed)
    if hidden.name == "learning rate":
        return hidden
    return Cause(
        "no data",
        f"no data= was given, and the script iterates {', '.join(resumed.uncounted)}: nothing counts its batches, so "
        "the resumed run began it again",
        (
            "pass the loader, Checkpointer(..., data=loader), and take its batches from ckpt.batches",
            *resumed.uncovered,
        ),
    )


def _of_hidden(difference: Difference, resumed: Trail) -> Cause:
    paths = [one.path for one in difference.of("state")]
    if paths and all(_is_rate(path) for path in paths):
        return Cause(
            "learning rate",
            f"only the learning rate differs ({paths[0]}): what sets it, a scheduler or a count of steps of your own, "
            "began again",
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
    """Mentions batches that could not be compared, because they did not pass through `ckpt.batches`."""
    if trail.batches_seen:
        return ""
    return " (the contents of the batches were not seen: pass data= and take them from ckpt.batches, and they are)"


def _deterministic(trail: Trail) -> tuple[str, ...]:
    settings = trail.certificate.get("settings", {})
    reasons = tuple(str(one) for one in trail.certificate.get("reasons", ()))
    if "deterministic_algorithms" not in settings or settings["deterministic_algorithms"]:
        return reasons
    return (*reasons, "torch.use_deterministic_algorithms(True) raises where torch has no deterministic kernel")


def _quoted(trail: Trail) -> tuple[str, ...]:
    """Quotes what the certificate says it cannot see."""
    caveats = tuple(f"the certificate says: {one}" for one in trail.certificate.get("caveats", ()))
    left = ", ".join(str(one) for one in trail.certificate.get("leaves_out", ()))
    return (*caveats, f"the certificate leaves out: {left}") if left else caveats


Kind = Literal["exact", "inexact", "unrepeatable"]


@record
class Trails:
    """The trails of one rank.

    uninterrupted: never interrupted.
    interrupted: killed after a save.
    resumed: continued from that save in a new process.
    repeated: a second uninterrupted run; None unless it was needed.
    """

    uninterrupted: Trail
    interrupted: Trail
    resumed: Trail
    repeated: Trail | None = None


@record
class ExactnessVerdict:
    """The verdict on a training.

    difference: the first difference, if any; a run that started over may still end the same.
    cause: the likely cause.
    unseeded: generators that start in different states in each run. If they change nothing else they do no harm: they
        are restored, and compared with the saved state only.
    rank: the rank that differs first, of several.
    """

    kind: Kind
    difference: Difference | None = None
    cause: Cause | None = None
    unseeded: tuple[str, ...] = ()
    rank: int | None = None


def not_seen(trail: Trail, ranks: int) -> tuple[str, ...]:
    """Describes what a certification does not try, or did not come across, which its verdict says nothing about."""
    found: list[str] = []
    if trail.uncounted:
        found.append(f"the position in the data: no data= was given, and nothing counts {', '.join(trail.uncounted)}")
    elif not trail.batches_seen:
        found.append("the data: no batch came from ckpt.batches")
    if trail.certificate.get("settings", {}).get("accelerator") is None:
        found.append("an accelerator: the script used none")
    found.append(f"any other number of ranks than {ranks}")
    if trail.memory:
        found.append("restarts from memory: memory= is left out while a script is certified")
    return (*found, "an end by a signal that the script handles: it was killed by SIGKILL")


def differs(trails: Trails) -> bool:
    """Returns whether the interrupted and resumed training differs from the uninterrupted one, which must then be
    repeated."""
    return (
        not trails.resumed.began
        or _between_fresh_runs(trails.uninterrupted, trails.interrupted) is not None
        or _not_restored(trails) is not None
        or _resumed(trails) is not None
    )


def judge(trails: Trails) -> ExactnessVerdict:
    """Returns the verdict; `repeated` is required if the trails differ."""
    if not differs(trails):
        return ExactnessVerdict("exact", unseeded=tuple(sorted(unseeded(trails.uninterrupted, trails.interrupted))))
    assert trails.repeated is not None, "without it, a training that does not repeat itself looks like a faulty resume"
    by_itself = _between_fresh_runs(trails.uninterrupted, trails.repeated)
    if by_itself is not None:
        guilty = _suspect_generators(trails.uninterrupted, trails.repeated, by_itself)
        return ExactnessVerdict("unrepeatable", by_itself, of_training(by_itself, trails.uninterrupted, guilty), guilty)
    if not trails.resumed.began:
        return ExactnessVerdict("inexact", _resumed(trails), no_resume(trails.interrupted.reached))
    before = _between_fresh_runs(trails.uninterrupted, trails.interrupted)
    if before is not None:
        return ExactnessVerdict("unrepeatable", before, of_chance(before))
    difference = _not_restored(trails) or _resumed(trails)
    assert difference is not None
    return ExactnessVerdict("inexact", difference, of_resume(difference, trails.resumed))


def worst(verdicts: Sequence[ExactnessVerdict]) -> ExactnessVerdict:
    """Combines the verdicts of all ranks: unrepeatable if any rank is, else that of the earliest difference."""
    if len(verdicts) == 1:
        return verdicts[0]
    for kind in ("unrepeatable", "inexact"):
        found = [(one.difference, rank) for rank, one in enumerate(verdicts) if one.kind == kind]
        if found:
            _, rank = min(found, key=lambda one: _when(one[0]))
            return replace(verdicts[rank], rank=rank)
    return replace(verdicts[0], unseeded=tuple(sorted({name for one in verdicts for name in one.unseeded})))


def _when(difference: Difference | None) -> tuple[int, bool]:
    """Orders a start before the step that follows from it."""
    return (-1, False) if difference is None else (difference.step, not difference.start)


def _between_fresh_runs(one: Trail, other: Trail) -> Difference | None:
    """Returns the first difference of two runs that both began from nothing."""
    return first_difference(one, other, unseeded(one, other))


def _resumed(trails: Trails) -> Difference | None:
    return first_difference(trails.uninterrupted, trails.resumed, unseeded(trails.uninterrupted, trails.interrupted))


def _not_restored(trails: Trails) -> Difference | None:
    """Returns where the new process's start differs from what the killed one had saved."""
    start = trails.resumed.rows[0]
    saved = next((row for row in trails.interrupted.rows if row.step == start.step), None)
    if saved is None or not start.start:
        return None
    found = compare(saved, start)
    return Difference(start.step, True, found) if found else None


def _suspect_generators(one: Trail, other: Trail, difference: Difference) -> tuple[str, ...]:
    """Returns unseeded generators that may have caused the difference: drawn from up to that step."""
    names = unseeded(one, other)
    return tuple(sorted(names if difference.start else names & drawn_from(one, difference.step)))
