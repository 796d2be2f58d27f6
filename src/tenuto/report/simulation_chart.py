"""Draws what failures cost a simulated training, as a picture in a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tenuto.errors import MissingExtra, UsageError, install
from tenuto.policy.simulation import Job, Outcome, simulate
from tenuto.units import count, seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES: Final = (".svg", ".png")
_WORK: Final = "#1b7f79"
_LOSSES: Final = (
    ("saving", "saving_s", "#7a6ff0"),
    ("done again", "lost_s", "#e08a1e"),
    ("down", "down_s", "#c2413b"),
)
_POINTS: Final = 21
_RANGE: Final = 16.0
"""How many times shorter and longer than the job's own the intervals are that are looked at."""
_LARGEST_FAILURES: Final = 200_000
_INK: Final = "#333333"
_GRID: Final = "#dddddd"


def draw(job: Job, found: Outcome, path: Path, *, seed: int = 0) -> None:
    """Draws where the time of the job went, and what other intervals between its saves would have come to, with the
    same failures. Raises UsageError for a file that is neither SVG nor PNG, or cannot be written, and MissingExtra
    without matplotlib."""
    if path.suffix.lower() not in SUFFIXES:
        hint = "tenuto simulate --plot costs.svg"
        raise UsageError(f"{path} is neither an .svg nor a .png file", subject="--plot", hint=hint)
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("--plot needs matplotlib", subject="--plot", hint=install("report")) from None
    ours: Any = {"svg.fonttype": "none", "svg.hashsalt": "tenuto", "font.size": 11}
    with style.context(["default", ours]):
        figure = Figure(figsize=(8.0, 4.8), layout="constrained")
        figure.suptitle(
            f"Effective training time ratio {found.ettr:.4f}: {1 - found.ettr:.2%} of {seconds(found.elapsed_s)} lost, "
            f"{count(found.failures, 'failure')}",
            x=0.01, ha="left", fontsize=12.5, color=_INK,
        )  # fmt: skip
        shares, curve = figure.subplots(2, 1, height_ratios=(1, 3.2))
        _shares(shares, found)
        _curve(curve, job, found, seed)
        try:
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise UsageError(f"{path} cannot be written: {why}", subject="--plot", hint="--plot costs.svg") from None


def _shares(axes: Axes, found: Outcome) -> None:
    """Draws what was lost, in its own scale: it is a few percent of the time."""
    left = 0.0
    for name, field, colour in _LOSSES:
        share = 100 * getattr(found, field) / found.elapsed_s
        axes.barh(0, share, left=left, color=colour, height=0.7, label=f"{name} {share:.2f} %")
        left += share
    axes.set_xlim(0, max(left, 1e-6))
    axes.set_yticks([])
    axes.set_xlabel("% of the time", color=_INK)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axes.tick_params(colors=_INK, length=0)
    axes.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1.02), frameon=False, borderaxespad=0, labelcolor=_INK)


def _curve(axes: Axes, job: Job, found: Outcome, seed: int) -> None:
    """Draws the ratio over the interval between saves."""
    chosen_s = found.between_saves_s
    at, ratio = [], []
    for between_s in np.geomspace(chosen_s / _RANGE, chosen_s * _RANGE, _POINTS).tolist():
        try:
            outcome = simulate(replace(job, save_s=between_s), seed, most_failures=_LARGEST_FAILURES)
        except UsageError:
            continue  # with this interval it never comes to its end
        at.append(between_s)
        ratio.append(outcome.ettr)
    axes.plot(at, ratio, color=_WORK, lw=1.8, marker="o", ms=3.5)
    axes.plot([chosen_s], [found.ettr], marker="*", ms=15, ls="none", color=_LOSSES[1][2], mec="white")
    axes.annotate(
        f"this job: a save after each {seconds(chosen_s)}",
        (chosen_s, found.ettr),
        xytext=(0, -60),
        textcoords="offset points",
        ha="center",
        color=_INK,
        arrowprops={"arrowstyle": "-", "color": _INK, "lw": 0.8, "shrinkB": 8},
    )
    axes.set_xscale("log")
    marked = [chosen_s * factor for factor in (1 / 16, 1 / 4, 1, 4, 16)]
    axes.set_xticks(marked, [seconds(one) for one in marked])
    axes.minorticks_off()
    axes.margins(y=0.18)
    axes.set_xlabel("work between two saves", color=_INK)
    axes.set_ylabel("effective training time ratio", color=_INK)
    axes.grid(axis="y", color=_GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    axes.tick_params(colors=_INK, length=0)
