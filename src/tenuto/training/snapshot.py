"""Flattens the state for a save: the user's, this process's own, and what the manifest records about both."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from tenuto.codec.digest import digest
from tenuto.engine.save.job import ManifestDetails
from tenuto.errors import TenutoError, UnsupportedPlatform
from tenuto.model.exactness import judged
from tenuto.model.ids import CheckpointId
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import Json
from tenuto.policy.keep import KEEP
from tenuto.record import record
from tenuto.repo.best import MODES
from tenuto.state.contract import Flattened, LoadReport
from tenuto.state.declarations import Late
from tenuto.state.encode.flattener import Flattener
from tenuto.state.frameworks import loaded
from tenuto.state.position.positions import DataPosition
from tenuto.state.position.training_position import TrainingPosition
from tenuto.state.tree import PRIVATE, items
from tenuto.version import __version__


def environment() -> dict[str, Json]:
    """Returns the versions of what is loaded already, and the kind of machine; no names of users, no paths, no
    environment variables."""
    found: dict[str, Json] = {
        "tenuto": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "numpy": np.__version__,
    }
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(torch.__version__)
    return found


def check_platform() -> None:
    """Raises UnsupportedPlatform on Windows, whose files cannot give what the commit needs."""
    if sys.platform == "win32":
        raise UnsupportedPlatform(
            "Tenuto does not run on Windows: its commit needs links and directory flushes that are not there",
            hint="use Linux, or the Windows Subsystem for Linux",
        )


# --------------------------------------------------------------------------------------------------
# A few elements of each tensor, which show changes that no counter of the tensor does, as when averaged weights are
# swapped in through `.data`.

ALONG: Final = (1, 16, 4, 3)
"""The most elements compared along each dimension, by how many dimensions a tensor has; 2 where it has more."""


def samples(sources: Sequence[Any], most: int | None = None) -> dict[int, Any]:
    """Returns elements of each source that counts its changes, by its number; `most`: of so many sources at most,
    evenly spread. They are copied where the tensors are, so that nothing waits for a device."""
    every = 1 if most is None else max(1, -(-len(sources) // most))
    return {at: _sample(sources[at]) for at in range(0, len(sources), every) if counts_changes(sources[at])}


def unchanged(before: Mapping[int, Any], sources: Sequence[Any]) -> bool:
    """Returns whether the samples taken `before` are still the same. Waits for the device."""
    return all(_same(few, _sample(sources[at])) for at, few in before.items())


def counts_changes(source: Any) -> bool:
    """Returns whether it is a tensor, which counts its changes in place."""
    return getattr(source, "_version", None) is not None and hasattr(source, "data_ptr")


def _sample(source: Any) -> Any:
    shape = source.shape
    along = ALONG[len(shape)] if len(shape) < len(ALONG) else 2
    return source.detach()[tuple(slice(None, None, max(1, -(-size // along))) for size in shape)].clone()


def _same(few: Any, now: Any) -> bool:
    try:
        if few.equal(now):
            return True
    except RuntimeError:  # a dtype whose values torch does not compare
        pass
    return str(few.tolist()) == str(now.tolist())  # where NaN equals itself


# --------------------------------------------------------------------------------------------------
# The certificate of a checkpoint: what it covers, what could make a resume from it inexact, and what ran. It is written
# for people, and nothing is decided by it.

NOT_COVERED: Final = (
    "gradients, unless tenuto.torch.Gradients is in the state, and autograd graphs",
    "train or eval mode of modules",
    "local variables and closures of the training script",
    "random generators that the program made for itself, unless they are in the state",
    "the data set's own bytes",
)
GIT_DEADLINE_S: Final = 2.0


@record
class Findings:
    """A framework's findings. reasons: why a resume is not exact; caveats: why it may not be; unknown: what is out of
    sight and usually matters; counted: whether an entry of the state has the position in the data."""

    reasons: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    counted: bool = False


UNCOUNTED: Final = (
    "the batches are not taken from ckpt.batches, so nothing counts them: the position in the data is not known"
)


def follow_loaders() -> dict[str, int]:
    """Begins to note the loaders that training iterates. Returns from where on, by framework."""
    return {framework.name: module.follow() for framework, module in loaded("iteration")}


def certificate(
    state: Mapping[str, Any],
    position: DataPosition | None,
    *,
    uncounted: bool = False,
    since: Mapping[str, int] | None = None,
    proof: Mapping[str, Json] | None = None,
) -> dict[str, Any]:
    """Returns the certificate as plain JSON values. `uncounted`: training takes its batches past `position`. `since`:
    what `follow_loaders` returned when it began. `proof`: what `tenuto certify` has found for this script.

    verdict: "proven", "no known gap", "unknown" or "not exact" (`model.exactness`). exact: whether it is one of the
        first two.
    reasons: what is known to make a resume inexact; unknown: what usually matters and was out of sight; caveats: what
        may make it inexact, and cannot be checked.
    uncounted: loaders that training has iterated and nothing counts.
    covers, leaves_out: what is in the checkpoint, and what never is.
    settings, versions, code: what ran. `code` is the git commit, and whether tracked files differ from it.
    """
    found = [module.findings(state) for _, module in loaded("certificate")]
    reasons: list[str] = []
    caveats: list[str] = []
    unknown: list[str] = []
    counted = False
    for one in found:
        reasons += one.reasons
        caveats += one.caveats
        unknown += one.unknown
        counted = counted or one.counted
    if proof is not None:  # what certify has tried: the optimizer, if any, was made anew, and it changed nothing
        caveats, unknown = caveats + unknown, []
    past: list[str] = []
    if position is None:
        iterated = sorted({name for _, module in loaded("iteration") for name in module.iterated(state)})
        past = sorted({*iterated, *_begun(state, since or {})})
        if iterated:
            reasons.append(
                f"training is in the middle of {', '.join(iterated)}, and no data= was given to count its batches"
            )
        elif past:
            unknown.append(f"training has iterated {', '.join(past)}, and no data= was given to count its batches")
        elif not counted:
            caveats.append("no data= was given, so the position in the data is not covered")
    elif uncounted:
        reasons.append(UNCOUNTED)
    else:
        reasons += position.reasons
        caveats += position.caveats
        for one in sorted(
            {name for _, module in loaded("iteration") for name in module.iterated(state, position.source)}
        ):
            reasons.append(
                f"training is in the middle of {one} too, beside its data=, and nothing counts its batches: add "
                "tenuto.torch.resumable(loader) to the state, and iterate that"
            )
    late = [str(name) for name, value in state.items() if type(value) is Late]
    reasons += [f"the entry {name!r} is still tenuto.late(), and is not saved" for name in late]
    covered = counted if position is None else position.exact and not uncounted
    generators = ["python", "numpy", *(framework.name for framework, _ in loaded("rng"))]
    versions: dict[str, Any] = {"tenuto": __version__, "python": platform.python_version(), "numpy": np.__version__}
    settings: dict[str, Any] = {}
    for one in found:
        versions.update(one.versions)
        settings.update(one.settings)
    content = {
        "reasons": reasons,
        "unknown": unknown,
        "caveats": caveats,
        "uncounted": past,
        "covers": [
            *(str(name) for name in state if str(name) not in late),
            "step and epoch",
            *(f"random generators of {name}" for name in generators),
            *(["position in the data"] if covered else []),
        ],
        "leaves_out": list(NOT_COVERED),
        "settings": settings,
        "versions": versions,
        "code": code_identity(),
        "form": {name: one for _, module in _forms() for name, one in module.form(state).items()},
    }
    if proof is not None and not past:  # certify has not seen where a loader stood that nothing counts
        content["proof"] = dict(proof)
    return judged(content)


def amended(
    certificate: Mapping[str, Any], state: Mapping[str, Any], report: LoadReport | None, reasons: Sequence[str]
) -> Mapping[str, Any]:
    """Returns a checkpoint's certificate with what the resume itself makes inexact: what of the state was left out
    (`report`), what of its form is another now, and other `reasons`."""
    found = list(reasons)
    saved = certificate.get("form")
    if report is not None:
        for paths, words in (
            (report.missing, "in the state, and not in the checkpoint"),
            (report.unexpected, "in the checkpoint, and not in the state"),
            (report.mismatched, "not restored"),
        ):
            if paths:
                more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
                found.append(f"{paths[0]}{more}: {words} (strict=False)")
    if isinstance(saved, Mapping):
        found += [one for _, module in _forms() for one in module.differences(state, saved)]
    if not found:
        return certificate
    # what certify has proved holds for a resume without these
    rest = {name: value for name, value in certificate.items() if name != "proof"}
    return judged(rest | {"reasons": list(dict.fromkeys([*certificate.get("reasons", ()), *found]))})


def _forms() -> Iterator[tuple[Any, Any]]:
    return ((framework, module) for framework, module in loaded("certificate") if hasattr(module, "form"))


def _begun(state: Mapping[str, Any], since: Mapping[str, int]) -> Iterator[str]:
    for framework, module in loaded("iteration"):
        if framework.name in since:
            yield from module.begun(state, since[framework.name])


def conditions(state: Mapping[str, Any], ranks: int) -> dict[str, Json]:
    """Returns what, besides the script, decides the bits of a training."""
    found = [module.findings(state) for _, module in loaded("certificate")]
    return {
        "platform": f"{platform.system()} {platform.machine()}",
        "ranks": ranks,
        "settings": {name: value for one in found for name, value in one.settings.items()},
        "versions": {
            "numpy": np.__version__,
            "python": platform.python_version(),
            "tenuto": __version__,
            **{name: value for one in found for name, value in one.versions.items()},
        },
    }


def elsewhere(position: DataPosition | None) -> list[str]:
    """Describes a resume on another number of ranks."""
    return [
        "every tensor and value of the state is restored, bit for bit",
        *([] if position is None else [position.elsewhere]),
        "random generators that are alike on all ranks stay so; of others new ranks begin new streams",
        "sums over ranks add up in another order, so results agree but for rounding",
    ]


@cache
def code_identity() -> dict[str, Any] | None:
    """Returns the git commit of the program that runs; None without git, outside a repository, or where git takes
    longer than 2 seconds."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    place = Path(main).resolve().parent if main else Path.cwd()
    commit = _git(place, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(place, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit.strip(), "dirty": None if changes is None else bool(changes.strip())}


def _git(place: Path, *arguments: str) -> str | None:
    # No optional locks: asking for the status must not get in the way of a git that the user runs.
    command = ["git", "--no-optional-locks", "-C", str(place), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_DEADLINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


RANDOM: Final = "random"
DATA: Final = "data"
FEW_TENSORS: Final = 64
"""The most tensors sampled at the end of a step that a late metric may still ask for: that happens at every step, and
the samples are seldom compared."""


@record
class StateMark:
    """A completed step that can still be saved, as long as nothing has changed the state since."""

    step: int
    flattened: Flattened
    besides: frozenset[str]
    """Private entries that may have changed."""
    marks: tuple[Any, ...]
    samples: Mapping[int, Any]
    progress: Mapping[str, Json]


class Snapshots:
    """Flattens one training state again and again."""

    def __init__(
        self,
        state: Mapping[str, Any],
        position: TrainingPosition,
        watched: Mapping[str, str] | None = None,
        modes: Mapping[str, str] | None = None,
        *,
        keep: str = "",
    ) -> None:
        """`watched`: the metrics that policies read, and which do; the certificate lists them, so that one that was
        never logged shows there. `modes`: in which direction those improve, where a policy says so. `keep`: the policy
        that retention follows, as text."""
        self.state = state
        by_metric = {name: dict(found) for name, found in (("watches", watched), (MODES, modes)) if found}
        self._policies: dict[str, Json] = {**by_metric, **({KEEP: keep} if keep else {})}
        self._position = position
        self._private: dict[str, Any] = {}
        self._flattener = Flattener(state, private=self._private, rank=position.rank)
        self._environment: dict[str, Json] | None = None
        self._since = follow_loaders()
        self.proof: Mapping[str, Json] | None = None
        """What `tenuto certify` has found for this script on this layout."""

    def now(self) -> Flattened:
        self._private.update(self._position.private())
        return self._flattener.flatten()

    def about(
        self,
        *,
        parent: CheckpointId | None,
        metrics: Mapping[str, float],
        reason: str,
        progress: Mapping[str, Json] | None = None,
    ) -> ManifestDetails:
        if self._environment is None:
            self._environment = environment()
        return ManifestDetails(
            parent=parent,
            metrics=dict(metrics),
            progress=dict(progress) if progress is not None else self._position.progress(),
            environment={**self._environment, "why": reason} if reason else self._environment,
            certificate=self.certificate(),
            reason=reason,
            marks=self._position.marks(),
        )

    def conditions(self) -> dict[str, Json]:
        return conditions(self.state, self._position.world_size)

    def certificate(self) -> dict[str, Json]:
        position = self._position
        found = certificate(
            self.state, position.data, uncounted=position.uncounted, since=self._since, proof=self.proof
        )
        found["caveats"] += self._position.caveats + self._position.reasons
        if self._position.world_size > 1:
            found["at_other_ranks"] = elsewhere(self._position.data)
        return {**found, **self._policies}

    def mark(self) -> StateMark | None:
        """Marks how the state is now, so that it can be saved later as it is now. Random states may have moved on by
        then: the mark has copies of them. None where the state cannot be represented (the next save raises)."""
        return self._state_mark(frozenset({RANDOM}), None)

    def passing_mark(self) -> StateMark | None:
        """Marks how the state is now; what is saved later is what is there then. So the position in the data may have
        moved on as well. Cheap enough for every step: it compares elements of only some of the tensors."""
        return self._state_mark(frozenset({RANDOM, DATA}), FEW_TENSORS)

    def _state_mark(self, besides: frozenset[str], most: int | None) -> StateMark | None:
        try:
            flattened = self.now()
        except TenutoError:
            return None
        marks = tuple(_mark(spec, source) for spec, source in _rows(flattened, besides))
        shared = flattened.sources[: sum(not spec.private for spec in flattened.specs)]
        step, progress = self._position.counters.step, self._position.progress()
        return StateMark(step, flattened, besides, marks, samples(shared, most), progress)

    def untouched(self, mark: StateMark, *, plain: bool = True) -> bool:
        """Returns whether the state is as it was at `mark`, as far as can be seen: tensors count their changes, and a
        few of their elements are compared; all else is compared completely. `plain=False`: but for the state's plain
        values, which the mark has copies of."""
        now, then = self.now(), mark.flattened
        rows, before = list(_rows(now, mark.besides)), list(_rows(then, mark.besides))
        return (
            [spec for spec, _ in rows] == [spec for spec, _ in before]
            and (not plain or now.tree == then.tree)
            and _entries(now, mark.besides) == _entries(then, mark.besides)
            and tuple(_mark(spec, source) for spec, source in rows) == mark.marks
            and unchanged(mark.samples, now.sources)
        )


def _rows(flattened: Flattened, besides: Container[str]) -> Iterator[tuple[LeafSpec, Any]]:
    """Yields rows and their sources, shared ones first, without the private entries `besides`."""
    for spec, source in zip(flattened.specs, flattened.sources, strict=True):
        if _entry(spec) not in besides:
            yield spec, source


def _entry(spec: LeafSpec) -> str:
    """Returns the private entry that a row is part of."""
    return spec.path.removeprefix(f"{PRIVATE}/").partition("/")[0] if spec.private else ""


def _entries(flattened: Flattened, besides: Container[str]) -> list[tuple[Any, Json]]:
    """Returns the plain private values."""
    return [pair for pair in items(flattened.private["v"]) if pair[0] not in besides]


def _mark(spec: LeafSpec, source: Any) -> Any:
    """Returns what changes when a source does: a tensor's own counter, or a digest of the bytes. A position's tensors
    are made anew each time, so that their counters show nothing. What cannot change is a mark by itself."""
    if getattr(source, "immutable", False):
        return source
    if counts_changes(source) and _entry(spec) != DATA:
        return (source.data_ptr(), source._version)
    return _content(source)


def _content(source: Any) -> Any:
    on_host = source.detach().cpu() if hasattr(source, "detach") else source
    try:
        return digest(np.ascontiguousarray(on_host).tobytes())
    except TypeError:  # a dtype that numpy does not know
        return str(on_host.tolist())
