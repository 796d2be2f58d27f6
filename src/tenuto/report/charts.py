"""Draws charts as SVG for a page: colours are the page's variables, texts stay texts."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from tenuto.errors import MissingExtra, install
from tenuto.record import record
from tenuto.report.series import Numbers, thinned
from tenuto.units import seconds, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Unit = Literal["", "bytes", "seconds"]

_COLOURS: Final = {
    "#010101": "var(--ink-2)",
    "#020202": "var(--grid)",
    "#030303": "var(--c1)",
    "#040404": "var(--c2)",
    "#050505": "var(--c3)",
    "#060606": "var(--damage)",
    "#070707": "var(--warning)",
    "#080808": "var(--paper)",
}
"""What matplotlib draws with, and the page's variable that takes its place."""
_TEXT, _GRID, _FIRST, _SECOND, _THIRD, _DAMAGE, _WARNING, _PAPER = _COLOURS
_SIZE: Final = (4.9, 2.3)
"""Inches of 72 units: on a narrow phone about one pixel each, so that text keeps its size there."""
LARGEST: Final = 1e150
"""What is larger has no place on an axis: the differences of two such numbers may be infinite."""
_MARGINS: Final = {"left": 0.165, "right": 0.985, "bottom": 0.14, "top": 0.97}
"""Room for eight characters beside each line of the grid. To measure the texts would double the time of a chart."""
_LOOKS: Final[dict[str, dict[str, Any]]] = {
    "first": {"color": _FIRST, "lw": 1.6},
    "second": {"color": _SECOND, "lw": 1.5, "ls": (0, (5, 1.5))},
    "third": {"color": _THIRD, "lw": 1.5, "ls": (0, (1.2, 1.2))},
    "behind": {"color": _FIRST, "lw": 1.1, "alpha": 0.38, "ls": (0, (3, 1.5))},
}
_MARKS: Final[dict[str, dict[str, Any]]] = {
    "checkpoint": {"marker": "o", "ms": 3.2, "mfc": _FIRST, "mec": _FIRST, "mew": 0},
    "latest": {"marker": "o", "ms": 7, "mfc": _PAPER, "mec": _FIRST, "mew": 1.8},
    "best": {"marker": "*", "ms": 11, "mfc": _SECOND, "mec": _PAPER, "mew": 0.7},
    "spike": {"marker": "^", "ms": 8, "mfc": _WARNING, "mec": _PAPER, "mew": 0.7},
    "nonfinite": {"marker": "x", "ms": 7, "mec": _DAMAGE, "mew": 2},
}


@record
class Line:
    """look: one of "first", "second", "third", "behind"."""

    x: Numbers
    y: Numbers
    look: str = "first"


@record
class Marks:
    """kind: one of "checkpoint", "latest", "best", "spike", "nonfinite". y: without it they stand on the axis."""

    kind: str
    x: Sequence[float]
    y: Sequence[float] | None = None


def chart(
    name: str, lines: Iterable[Line], marks: Iterable[Marks] = (), *, unit: Unit = "", times: bool = False
) -> str:
    """Returns an `<svg>` element.

    Each line is drawn with about a thousand points; one that spans several orders of magnitude gets a logarithmic axis.
    name: unlike that of any other chart of the page. times: x is seconds since 1970. Raises MissingExtra without
    matplotlib.
    """
    try:
        from matplotlib import style
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("a report as a page needs matplotlib", hint=install("report")) from None
    lines = [replace(line, y=np.where(np.abs(line.y) < LARGEST, line.y, np.nan)) for line in lines]
    ours: Any = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 12, "path.simplify": False}
    with style.context(["default", ours]), np.errstate(all="ignore"):
        figure = Figure(figsize=_SIZE)
        figure.subplots_adjust(**_MARGINS)
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        _axes(axes, lines, unit, times)
        for line in lines:
            shown = thinned(line.y)
            axes.plot(line.x[shown], line.y[shown], **_LOOKS[line.look], solid_joinstyle="round")
        for one in marks:
            on_axis = {"transform": axes.get_xaxis_transform(), "clip_on": False} if one.y is None else {"zorder": 5}
            y = np.full(len(one.x), 0.04) if one.y is None else np.array(one.y, np.float64)
            axes.plot(one.x, np.where(np.abs(y) < LARGEST, y, np.nan), ls="none", **_MARKS[one.kind], **on_axis)
        out = io.StringIO()
        figure.savefig(
            out, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    return _for_page(out.getvalue())


def _axes(axes: Axes, lines: Sequence[Line], unit: Unit, times: bool) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator, NullFormatter

    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    axes.grid(axis="y", color=_GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_TEXT, which="both", length=0, labelsize=12)
    axes.margins(x=0.02, y=0.1)
    known = np.concatenate([line.y[np.isfinite(line.y)] for line in lines] or [np.empty(0)])
    if len(known) and known.min() > 0 and np.quantile(known, 0.95) > 100 * np.quantile(known, 0.05):
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(4))
        if unit == "bytes":
            most = max(float(known.max(initial=0)), 1.0)
            axes.set_ylim(0, 1.15 * most)
            axes.yaxis.set_major_locator(MultipleLocator(2.0 ** np.ceil(np.log2(most / 4))))
    named = {"": _number, "bytes": lambda value: size(round(value)), "seconds": seconds}[unit]
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: named(value) if value > 0 or not unit else "0"))
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    days = max((line.x.max() - line.x.min() for line in lines if len(line.x)), default=0) > 2 * 86_400
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _time(x, days) if times else f"{x:,.0f}"))


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e")


def _time(when: float, days: bool) -> str:
    return datetime.fromtimestamp(when, UTC).strftime("%b %-d" if days else "%H:%M")


def _for_page(text: str) -> str:
    """Returns the element alone, in the page's colours and font, as wide as its place."""
    text = text[text.index("<svg ") :]
    text = re.sub(r"<svg [^>]*viewBox=\"([^\"]*)\"[^>]*>", r'<svg viewBox="\1" aria-hidden="true">', text, count=1)
    text = re.sub(r"<style.*?</style>|<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r' id="[\w.]+_\d+"', "", text)
    text = re.sub(r" font-family: [^;\"]*;", "", text)
    text = re.sub(r' (?:d|x|y)="[^"]*"', lambda found: re.sub(r"(\d\.\d)\d+", r"\1", found[0]), text)
    text = re.sub(r"#(0[1-8])\1\1", lambda found: _COLOURS[found[0]], text)
    return re.sub(r"\s*\n\s*", " ", text)
