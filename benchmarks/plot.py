"""Draws the committed results, and nothing else, as docs/images/*.svg.

    python benchmarks/plot.py                       # needs the `bench` extra: matplotlib
    python benchmarks/plot.py --png /tmp/look       # PNGs as well, on a light and on a dark ground

Each figure is a median with its 95 % bootstrap interval, in multiples of what the machine itself takes for the same
bytes: one copy in memory, or the raw direct write or read, measured in the same rounds. Targets are lines.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import table
from matplotlib import pyplot

mpl.use("svg")
mpl.rcParams.update({"svg.hashsalt": "tenuto", "svg.fonttype": "path", "font.size": 9, "font.family": "DejaVu Sans"})

IMAGES = Path(__file__).parent.parent / "docs" / "images"
TEXT = "#808080"
"""About as far from white as from a dark page: the ground is the reader's."""
OURS, THEIRS, GOAL = "#12a08d", "#8b95a8", "#dd8a2e"
RESAMPLES = 10_000
LABEL = 0.22
"""Room for a figure beside its bar, as a share of the longest."""
NAMES = {
    "tenuto save()": "Tenuto",
    "tenuto save(wait=True)": "Tenuto",
    "tenuto.load": "Tenuto",
    "tenuto restore()": "Tenuto",
    "tenuto save(), fenced": "Tenuto, fenced",
    "tenuto save(), eager": "Tenuto, eager",
    "lost to a tenuto save()": "Tenuto",
    "lost to a tenuto save(), fenced": "Tenuto, fenced",
    "restore() from memory, one thread": "Tenuto, from memory",
    "torch.load + copy, cold disk": "torch.load, cold disk",
    "tenuto.Checkpointer, memory tier": "Tenuto, memory tier",
    "restore() from memory, tenuto": "Tenuto, from memory",
    "tenuto.Checkpointer": "Tenuto",
    "tenuto.save, one-off": "Tenuto, one-off",
    "dcp.async_save, thread": "dcp.async_save (thread)",
    "dcp.async_save, process": "dcp.async_save (process)",
    "lost to a dcp.async_save, thread": "dcp.async_save (thread)",
    "lost to a dcp.async_save, process": "dcp.async_save (process)",
}


@dataclass(frozen=True)
class Panel:
    """`goal`: the multiple of the reference that is aimed at."""

    id: str
    title: str
    reference: str
    unit: str
    contenders: Sequence[str]
    goal: float
    of_medians: bool = False


SAVERS = ("tenuto save()", "dcp.async_save, thread", "dcp.async_save, process", "torch.save")
FENCED_SAVERS = ("tenuto save(), fenced", "tenuto save(), eager", *SAVERS[1:3])
WRITERS = (
    "tenuto save(wait=True)",
    "tenuto.save, one-off",
    "safetensors + fsync",
    "torch_checkpointing + fsync",
    "torch.save + fsync",
    "dcp.save",
)
RESTARTERS = ("restore() from memory, one thread", "torch.load + copy, cold disk")
READERS = ("tenuto.load", "safetensors + copy", "torch.load(mmap) + copy", "dcp.load", "torch.load + copy")


def is_ours(name: str) -> bool:
    return "tenuto" in name or NAMES.get(name, "").startswith("Tenuto")


def panels(documents: dict[str, Any]) -> list[Panel]:
    """Those whose results are there; of a benchmark at several sizes the largest, of those with a peer beside it."""
    wanted = [
        Panel("p1_stall", "training blocked by an asynchronous save", "memcpy", "copies in memory", SAVERS, 1.05),
        Panel("p2_fenced", "training blocked by a fenced save", "memcpy", "copies in memory", FENCED_SAVERS, 0.05),
        Panel(
            "p3_overhead",
            "training time lost to a save",
            "memcpy",
            "copies in memory",
            tuple(f"lost to a {name}" for name in (SAVERS[0], FENCED_SAVERS[0], *SAVERS[1:3])),
            2.0,
            of_medians=True,
        ),
        Panel("p4_sync_save", "durable save", "raw O_DIRECT write", "raw direct writes", WRITERS, 1 / 0.9),
        Panel("p5_restore_hot", "restore from the page cache", "memcpy", "copies in memory", READERS, 1.4),
        Panel("p5_restore_cold", "restore from a cold disk", "raw O_DIRECT read", "raw direct reads", READERS, 1 / 0.9),
        Panel("p9_restart", "back after kill -9", "memcpy, one thread", "copies by one thread", RESTARTERS, 1.5),
    ]
    return _there(wanted, documents)


def panels_of_ranks(documents: dict[str, Any]) -> list[Panel]:
    """The same of jobs of several processes, each figure the slowest rank's."""
    found: list[Panel] = []
    for ranks in table.RANKS:
        first = f"{ranks} ranks: "
        lost = tuple(f"lost to a {name}" for name in (SAVERS[0], FENCED_SAVERS[0], *SAVERS[1:3]))
        copies, writes, reads = "copies by all ranks", "raw direct writes by all ranks", "raw direct reads by all ranks"
        held, readers = f"{first}blocked by a", ("tenuto restore()", "dcp.load")
        wanted = [
            Panel("stall", f"{held}n asynchronous save", "memcpy", copies, SAVERS, 1.05),
            Panel("fenced", f"{held} fenced save", "memcpy", copies, FENCED_SAVERS, 0.05),
            Panel("compute", f"{first}training time lost to a save", "memcpy", copies, lost, 2.0, of_medians=True),
            Panel("durable", f"{first}durable save", "raw O_DIRECT write", writes, (WRITERS[0], WRITERS[-1]), 1 / 0.9),
            Panel("restore_hot", f"{first}restore from the page cache", "memcpy", copies, readers, 1.4),
            Panel("restore_cold", f"{first}restore from a cold disk", "raw O_DIRECT read", reads, readers, 1 / 0.9),
        ]
        found += _there([replace(panel, id=f"ranks_{panel.id}_{ranks}") for panel in wanted], documents)
    return found


def _there(wanted: Sequence[Panel], documents: dict[str, Any]) -> list[Panel]:
    """Those whose results are there."""
    found = [(panel, largest(panel.id, documents, panel.contenders)) for panel in wanted]
    return [replace(panel, id=id) for panel, id in found if id is not None]


def largest(id: str, documents: dict[str, Any], contenders: Sequence[str] = ()) -> str | None:
    """Which of a benchmark's results is the one with the largest state: among those with a peer in them, if any."""
    there = [one for one in (f"{id}_4gib", f"{id}_1gib", id, f"{id}_0.1gib") if one in documents]
    peers = {name for name in contenders if not is_ours(name)}
    beside = [one for one in there if peers & {*documents[one]["seconds"], *documents[one]["median_s"]}]
    return next(iter(beside or there), None)


def multiple(above: Sequence[float], below: Sequence[float], *, of_medians: bool) -> tuple[float, float, float]:
    """As harness.Result.ratio, of what a result file holds."""
    rounds = min(len(above), len(below))
    one, other = np.array(above[:rounds]), np.array(below[:rounds])
    draws = np.random.default_rng(0).integers(0, rounds, (RESAMPLES, rounds))
    if of_medians:
        found, middle = (
            np.median(one[draws], axis=1) / np.median(other[draws], axis=1),
            np.median(one) / np.median(other),
        )
    else:
        found, middle = np.median((one / other)[draws], axis=1), np.median(one / other)
    low, high = np.percentile(found, [2.5, 97.5])
    return float(middle), float(low), float(high)


def draw(axes: Any, panel: Panel, document: dict[str, Any]) -> None:
    seconds = document["seconds"]
    shown = [name for name in panel.contenders if seconds.get(name)]
    found = [multiple(seconds[name], seconds[panel.reference], of_medians=panel.of_medians) for name in shown]
    widest = max(panel.goal, *(max(middle, high) for middle, _, high in found))
    for place, (name, (middle, low, high)) in enumerate(zip(shown, found, strict=True)):
        colour = OURS if is_ours(name) else THEIRS
        axes.barh(place, middle, height=0.52, color=colour, alpha=1.0 if place == 0 else 0.6, linewidth=0)
        axes.plot([low, high], [place, place], color=TEXT, linewidth=1.6, solid_capstyle="butt")
        end = max(high, middle, 0.0)
        if panel.goal - LABEL * widest < end < panel.goal:
            end = panel.goal  # the line would run through the figure
        axes.annotate(
            table.seconds(float(np.median(seconds[name]))),
            (end, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=colour if place == 0 else TEXT,
            weight="bold" if place == 0 else "normal",
        )
    axes.set_yticks(range(len(shown)), [NAMES.get(name, name) for name in shown])
    axes.invert_yaxis()
    axes.set_ylim(len(shown) - 0.45, -0.8)
    axes.set_xlim(min(0, axes.get_xlim()[0]), widest * (1 + LABEL))
    _goal(axes, panel, widest)
    axes.set_title(
        f"{panel.title}, {table.size(document)} GiB", loc="left", color=TEXT, fontsize=9, weight="bold", pad=8
    )
    axes.set_xlabel(panel.unit, color=TEXT, fontsize=8, loc="left")


def _goal(axes: Any, panel: Panel, widest: float) -> None:
    axes.axvline(panel.goal, color=GOAL, linewidth=1.2, linestyle=(0, (4, 2)))
    axes.annotate(
        f"aim {panel.goal:.2f}".rstrip("0").rstrip("."),
        (panel.goal, -0.72),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        color=GOAL,
        fontsize=8,
    )
    axes.patch.set_visible(False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(TEXT)
    axes.tick_params(axis="x", colors=TEXT, labelsize=8, length=3)
    axes.tick_params(axis="y", colors=TEXT, length=0)
    axes.xaxis.set_major_locator(mpl.ticker.MaxNLocator(5, integer=widest > 4))


def time_figure(documents: dict[str, Any], chosen: Sequence[Panel]) -> Any:
    tall = [max(len([name for name in one.contenders if documents[one.id]["seconds"].get(name)]), 3) for one in chosen]
    columns = 2
    pairs = [max(tall[at : at + columns]) for at in range(0, len(chosen), columns)]
    figure, grid = pyplot.subplots(
        len(pairs),
        columns,
        figsize=(10.0, sum(pairs) * 0.27 + len(pairs) * 0.95),
        height_ratios=[one + 2.4 for one in pairs],
        squeeze=False,
    )
    for axes in grid.flat[len(chosen) :]:
        axes.set_visible(False)
    for axes, panel in zip(grid.flat, chosen, strict=False):
        draw(axes, panel, documents[panel.id])
    figure.tight_layout(h_pad=1.8, w_pad=2.5)
    return figure


def memory_figure(document: dict[str, Any]) -> Any:
    """Memory above what the training holds: what only its owner gives back, and the page cache on top of it."""
    held = [name.removesuffix(": held") for name in document["bytes"] if name.endswith(": held")]
    loads = [name for name in held if "load" in name or "copy" in name or "restore" in name]
    saves = [name for name in held if name not in loads]
    figure, grid = pyplot.subplots(1, 2, figsize=(10.0, max(len(loads), len(saves)) * 0.27 + 1.0), squeeze=False)
    state = document["state"]["gib"] * 1024
    for axes, names, title, goal in (
        (grid[0][0], saves, "memory of a save", state + 64),
        (grid[0][1], loads, "memory of a restore", 128.0),
    ):
        widest = max(
            goal, *(float(np.median(document["bytes"][f"{one}: with page cache"])) / table.MIB for one in names)
        )
        for place, name in enumerate(names):
            own = float(np.median(document["bytes"][f"{name}: held"])) / table.MIB
            whole = max(float(np.median(document["bytes"][f"{name}: with page cache"])) / table.MIB, own)
            colour = OURS if is_ours(name) else THEIRS
            axes.barh(place, whole, height=0.52, color=colour, alpha=0.3, linewidth=0)
            axes.barh(place, own, height=0.52, color=colour, linewidth=0)
            words = f"{own:,.0f}" + (f" + {whole - own:,.0f} cache" if whole - own > 32 else "")
            end = goal if goal - LABEL * widest < whole < goal else whole
            axes.annotate(words, (end, place), xytext=(5, 0), textcoords="offset points", va="center", color=TEXT)
        axes.set_yticks(range(len(names)), [NAMES.get(name, name) for name in names])
        axes.set_ylim(len(names) - 0.45, -0.8)
        axes.set_xlim(0, widest * 1.8)
        panel = Panel("p8_memory", title, "", "MiB", names, goal)
        _goal(axes, panel, widest * 1.5)
        axes.set_title(
            f"{title}, {table.size(document)} GiB", loc="left", color=TEXT, fontsize=10, weight="bold", pad=8
        )
        axes.set_xlabel(
            f"MiB above the {'training' if names is saves else 'tensors that are filled'}; pale: page cache",
            color=TEXT,
            fontsize=8,
            loc="left",
        )
    figure.tight_layout(w_pad=2.5)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--png", type=Path, help="write PNGs to look at into this directory, too")
    options = parser.parse_args()
    documents = table.load()
    figures = {"measured": time_figure(documents, panels(documents))}
    of_ranks = panels_of_ranks(documents)
    if of_ranks:
        figures["ranks"] = time_figure(documents, of_ranks)
    memory = largest("p8_memory", documents)
    if memory is not None:
        figures["memory"] = memory_figure(documents[memory])
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(IMAGES / f"{name}.svg", transparent=True, metadata={"Date": None, "Creator": None})
        if options.png is not None:
            options.png.mkdir(parents=True, exist_ok=True)
            for ground, colour in (("light", "white"), ("dark", "#0d1117")):
                figure.savefig(options.png / f"{name}-{ground}.png", dpi=110, facecolor=colour)


if __name__ == "__main__":
    main()
