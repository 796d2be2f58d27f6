"""The certificate of a checkpoint: what it covers, what could make a resume from it inexact, and what ran.

Its words are for a person. Nothing is decided by it, and it holds no names of users, no paths and no environment
variables.
"""

from __future__ import annotations

import importlib
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from holdfast.state.data import DataPosition
from holdfast.version import __version__

FRAMEWORKS: Final[Mapping[str, str]] = {"torch": "holdfast.integrations.torch.certificate"}
NOT_COVERED: Final = (
    "gradients and autograd graphs",
    "train or eval mode of modules",
    "local variables and closures of the training script",
    "random generators that the program made for itself, unless they are in the state",
    "the data set's own bytes",
)
GIT_DEADLINE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Findings:
    """What a framework knows. reasons: a resume is not exact; caveats: it may not be."""

    reasons: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)


def certificate(state: Mapping[str, Any], position: DataPosition | None) -> dict[str, Any]:
    """As plain JSON values.

    exact: nothing is known that would make a resume inexact; `reasons` says what is. caveats: what may, and cannot be
    seen from here. covers, leaves_out: what is in the checkpoint, and what never is. settings, versions, code: what ran
    (code: git commit and whether tracked files differ from it; None outside a repository).
    """
    found = [
        importlib.import_module(module).findings(state)
        for name, module in FRAMEWORKS.items()
        if sys.modules.get(name) is not None
    ]
    reasons = [reason for one in found for reason in one.reasons]
    caveats = [caveat for one in found for caveat in one.caveats]
    if position is None:
        caveats.append("no data= was given, so the position in the data is not covered")
    else:
        reasons += position.reasons
        caveats += position.caveats
    frameworks = [name for name in FRAMEWORKS if sys.modules.get(name) is not None]
    versions: dict[str, Any] = {"holdfast": __version__, "python": platform.python_version(), "numpy": np.__version__}
    settings: dict[str, Any] = {}
    for one in found:
        versions.update(one.versions)
        settings.update(one.settings)
    return {
        "exact": not reasons,
        "reasons": reasons,
        "caveats": caveats,
        "covers": [
            *(str(name) for name in state),
            "step and epoch",
            *(f"random generators of {name}" for name in ("python", "numpy", *frameworks)),
            *(["position in the data"] if position is not None and position.exact else []),
        ],
        "leaves_out": list(NOT_COVERED),
        "settings": settings,
        "versions": versions,
        "code": code_identity(),
    }


def elsewhere(position: DataPosition | None) -> list[str]:
    """What a resume on another number of ranks comes to, in words."""
    return [
        "every tensor and value of the state is restored, bit for bit",
        *([] if position is None else [position.elsewhere]),
        "random generators that are alike on all ranks stay so; of others new ranks begin new streams",
        "sums over ranks add up in another order, so results agree but for rounding",
    ]


@cache
def code_identity() -> dict[str, Any] | None:
    """The git commit of the program that runs, once per process; None without git, outside a repository, or where git
    takes longer than 2 seconds."""
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
