"""The report as one HTML page: no network, no font, no script of anybody else's; readable without JavaScript."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from tenuto.errors import MissingExtra, install
from tenuto.formats.beside import Beside, refuse_other
from tenuto.model.ids import attempt_key
from tenuto.record import record
from tenuto.report import lineage
from tenuto.report.attention import all_clear
from tenuto.report.charts import Line, Marks, chart
from tenuto.report.facts import lines_of
from tenuto.units import age, count, seconds, size

if TYPE_CHECKING:
    from collections.abc import Callable

    from tenuto.report.charts import Unit
    from tenuto.report.facts import CheckpointReport, MetricReport, Report, RunReport
    from tenuto.report.series import Numbers
    from tenuto.report.supervision import Outage, Supervision

GENERATOR: Final = '<meta name="generator" content="tenuto report">'
"""By which a page is known as one that may be replaced."""
RUNS_DRAWN: Final = 6
"""Runs with charts: those that saved last. All runs are in the tables."""
METRICS_DRAWN: Final = 12
SHOWN: Final = 8
"""What needs attention and is shown at once; the rest is one click away."""
COLUMNS: Final = 3
"""Metrics that are columns of the table of checkpoints."""
LINES_BEHIND: Final = 20
"""Lines left behind that a chart has, the newest ones."""
OUTAGES_SHOWN: Final = 20
DOTS: Final = 60
"""Up to so many checkpoints, each is a dot on its line."""


@record
class Figure:
    """A chart with what stands around it. legend: pairs of a look and its name."""

    title: str
    summary: str
    svg: str
    legend: tuple[tuple[str, str], ...]


def page(report: Report, title: str | None = None) -> str:
    """Returns the page. Raises MissingExtra without jinja2 or matplotlib."""
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError:
        raise MissingExtra("a report as a page needs jinja2", hint=install("report")) from None
    room = files("tenuto.report")
    script = room.joinpath("page.js").read_text("utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    ago: Callable[[float | None], str] = partial(_ago, report.made_s)
    environment.filters |= {
        "size": size,
        "seconds": seconds,
        "age": age,
        "moment": _moment,
        "ago": ago,
        "value": _value,
    }
    environment.globals |= {"count": count, "attempt_key": attempt_key}
    runs = sorted(report.runs, key=_last_save, reverse=True)
    drawn = [run for run in runs if run.checkpoints][:RUNS_DRAWN]
    policy = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.from_string(room.joinpath("page.html").read_text("utf-8")).render(
        report=report,
        runs=runs,
        title=title or f"Checkpoints at {report.where}",
        generator=Markup(GENERATOR),
        style=Markup(room.joinpath("page.css").read_text("utf-8")),
        script=Markup(script),
        script_digest=policy,
        levels=[
            (level, sum(one.level == level for one in report.attention)) for level in ("damage", "warning", "note")
        ],
        all_clear=_sentence(all_clear(report.runs)),
        tiles=list(_tiles(report, ago)),
        drawing=lineage.drawing(drawn),
        events=list(lineage.events(drawn)),
        drawn=[(run, [(one, Markup(one.svg)) for one in _figures(run)]) for run in drawn],
        not_drawn=len([run for run in report.runs if run.checkpoints]) - len(drawn),
        metrics=_columns(report),
        rows=_newest_first(runs),
        recovery=[(one, Markup(one.svg)) for one in _recovery(report.supervision)],
        outages=_outages(report.supervision),
        outages_shown=OUTAGES_SHOWN,
        most=METRICS_DRAWN,
        shown=SHOWN,
    )


def write(path: Path, text: str) -> int:
    """Does what `Report.write` does."""
    refuse_other(path, GENERATOR, "a report", "-o")
    with Beside(path) as beside:
        nbytes = beside.part.write_bytes(text.encode())
        beside.publish(force=True)
    return nbytes


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _moment(when_s: float | None) -> str:
    return "" if when_s is None else datetime.fromtimestamp(when_s, UTC).strftime("%Y-%m-%d %H:%M")


def _ago(now_s: float, when_s: float | None) -> str:
    return "" if when_s is None else age(max(now_s - when_s, 0))


def _value(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.4g}"


def _last_save(run: RunReport) -> float:
    return max((one.created_s or 0.0 for one in run.checkpoints), default=0.0)


def _newest_first(runs: Sequence[RunReport]) -> list[CheckpointReport]:
    """Returns all saves; one whose time is unknown stands above the one before it in its run."""
    rows = []
    for run in runs:
        when = 0.0
        for one in run.saves:
            when = max(when, one.created_s or 0.0) if one.on_line or one.created_s is None else one.created_s
            rows.append((when, one.id, one))
    return [one for _, _, one in sorted(rows, key=lambda row: row[:2], reverse=True)]


def _columns(report: Report) -> list[str]:
    """Returns the metrics that the table has: those that training's policies go by first."""
    metrics = [metric for run in report.runs for metric in run.metrics]
    ordered = [*(one.name for one in metrics if one.mode is not None), *(one.name for one in metrics)]
    return list(dict.fromkeys(ordered))[:COLUMNS]


def _tiles(report: Report, ago: Callable[[float | None], str]) -> Iterator[tuple[str, str, str]]:
    """Yields figures to look at first: what it is, its value, and more about it."""
    checkpoints = [one for run in report.runs for one in run.checkpoints]
    latest = [run.newest or run.checkpoints[-1] for run in report.runs if run.checkpoints]
    newest = max(latest, key=lambda one: one.created_s or 0.0, default=None)
    if newest is not None:
        yield "Newest checkpoint", f"{ago(newest.created_s)} old", f"step {newest.id.step:,} of {newest.id.run}"
    training = [run.run for run in report.runs if run.trainer == "training"]
    yield "Training now", f"{len(training)} of {count(len(report.runs), 'run')}", ", ".join(training[:3])
    yield "Checkpoints", f"{len(checkpoints):,}", f"{sum(one.damaged for one in checkpoints):,} damaged"
    more = [f"{size(report.logical)} of state"]
    more += [f"{size(report.trash)} in the trash"] if report.trash else []
    more += [f"{size(report.free)} free"] if report.free is not None else []
    yield "Stored", size(report.stored), ", ".join(more)
    whole = [one for one in checkpoints if one.checked in ("verified", "proven")]
    last = max((one.checked_s for one in whole if one.checked_s is not None), default=None)
    yield (
        "Last verified",
        f"{ago(last)} ago" if last is not None else "never",
        f"{len(whole):,} of {len(checkpoints):,}",
    )
    if report.supervision:
        all_s = sum(one.ended_s - one.began_s for one in report.supervision)
        lost_s = sum(one.lost_s for one in report.supervision)
        ended = sum(len(one.outages) for one in report.supervision)
        share = 1 - lost_s / all_s if all_s else 1.0
        yield (
            "Effective training time",
            f"{100 * max(share, 0.0):.4g} %",
            f"{seconds(lost_s)} lost by {count(ended, 'end')} in {seconds(all_s)}",
        )
    timed = sorted(checkpoints, key=lambda one: one.created_s or 0.0)[-50:]
    held = [one.timing.held_s for one in timed if one.timing is not None]
    if held:
        written = [one.timing.write_s for one in timed if one.timing is not None]
        yield (
            "Training blocked",
            seconds(float(np.median(held))),
            f"for each save; written in {seconds(float(np.median(written)))}",
        )


def _outages(found: Sequence[Supervision]) -> list[Outage]:
    """Returns all ends that nobody asked for, the newest first."""
    return sorted((one for each in found for one in each.outages), key=lambda one: one.ended_s, reverse=True)


def _recovery(found: Sequence[Supervision]) -> Iterator[Figure]:
    """Yields what each end has cost, over time: steps that had to be trained again, and seconds."""
    outages = _outages(found)[::-1]
    kinds: tuple[tuple[str, str, Unit], ...] = (
        ("Steps trained again (RPO)", "lost_steps", ""),
        ("Time to a new step (RTO)", "lost_s", "seconds"),
    )
    for title, name, unit in kinds:
        there = [(one.ended_s, value) for one in outages if (value := getattr(one, name)) is not None]
        if there:
            when, y = (np.array(column, np.float64) for column in zip(*there, strict=True))
            marks = [Marks("checkpoint", when.tolist(), y.tolist())]
            svg = chart(f"recovery {name}", [Line(when, y, "first")], marks, unit=unit, times=True)
            most = seconds(float(y.max())) if unit else f"{y.max():,.0f}"
            yield Figure(title, f"{most} a restart, at most", svg, ())


def _figures(run: RunReport) -> Iterator[Figure]:
    for metric in run.metrics[:METRICS_DRAWN]:
        yield _metric(run, metric)
    yield from (*_sizes(run), *_cost(run), *_health(run))


def _sizes(run: RunReport) -> Iterator[Figure]:
    saves = sorted((one for one in run.checkpoints if one.created_s), key=lambda one: one.created_s or 0.0)
    if saves:
        when = np.array([one.created_s for one in saves], np.float64)
        raw, stored = (np.array([getattr(one, name) for one in saves], np.float64) for name in ("logical", "stored"))
        lines = [Line(when, raw, "second"), Line(when, stored, "first")]
        svg = chart(f"{run.run} size", lines, unit="bytes", times=True)
        legend = (("first", "in its own files"), ("second", "of state"))
        yield Figure("Size of a checkpoint", f"newest {size(saves[-1].stored)}", svg, legend)


def _cost(run: RunReport) -> Iterator[Figure]:
    timed = sorted((one for one in run.checkpoints if one.timing is not None), key=lambda one: one.id.step)
    steps = np.array([one.id.step for one in timed], np.float64)
    lines, legend = [], []
    for look, name, words in (
        ("first", "held_s", "training blocked"),
        ("second", "write_s", "writing"),
        ("third", "commit_s", "commit"),
    ):
        y = np.array([getattr(one.timing, name) or math.nan for one in timed], np.float64)
        if np.isfinite(y).any():
            lines.append(Line(steps, y, look))
            legend.append((look, words))
    if lines:
        longest = max(one.timing.held_s for one in timed if one.timing is not None)
        svg = chart(f"{run.run} cost", lines, unit="seconds")
        yield Figure("Time of a save", f"training blocked for at most {seconds(longest)}", svg, tuple(legend))


def _health(run: RunReport) -> Iterator[Figure]:
    """Yields a chart of what saves have noted of their values, where there is something to see."""
    for name, title in (
        ("norm", "Norm of all values"),
        ("changed", "Share of bytes that a save changed"),
        ("nonfinite", "Values that are not finite"),
    ):
        there = [(one, value) for one in run.line if (value := getattr(one.health, name, None)) is not None]
        y = np.array([value for _, value in there], np.float64)
        if there and (name != "nonfinite" or y.any()):
            x = np.array([one.id.step for one, _ in there], np.float64)
            sick = [one.id.step for one, value in there if one.unhealthy or not math.isfinite(value)]
            marks = [*_dots(x, y), *([Marks("nonfinite", _apart(sick))] if sick else [])]
            legend = (("nonfinite", "unhealthy, or not a finite number"),) if sick else ()
            svg = chart(f"{run.run} health {name}", [Line(x, y)], marks)
            yield Figure(title, f"latest {_value(float(y[-1]))}", svg, legend)


def _metric(run: RunReport, metric: MetricReport) -> Figure:
    name = metric.name
    there = [one for one in run.checkpoints if name in one.metrics]
    at = {one.id: (one.id.step, one.metrics[name]) for one in there}
    line, *behind = lines_of(there)
    x, y = _xy(line, name)
    legend = [("first", "leads to the latest")] if behind else []
    lines = [Line(*_xy(_own(other), name), "behind") for other in behind[-LINES_BEHIND:]]
    legend += [("behind", "left behind")] if behind else []
    marks = _dots(x, y)
    latest = [one.id for one in line if one.latest]
    for kind, ids, words in (
        ("latest", latest, "latest"),
        ("best", [metric.best] if metric.best else [], f"best ({metric.mode})"),
        ("spike", metric.spikes, "spike"),
    ):
        points = [at[id] for id in ids if id in at and math.isfinite(at[id][1])]
        if points:
            marks.append(Marks(kind, [one[0] for one in points], [one[1] for one in points]))
            legend.append((kind, words))
    if metric.nonfinite:
        marks.append(Marks("nonfinite", _apart([id.step for id in metric.nonfinite])))
        legend.append(("nonfinite", "not a finite number"))
    summary = [f"latest {_value(line[-1].metrics[name])}"] if line else []
    if metric.best in at:
        summary.append(f"best {_value(at[metric.best][1])} at step {metric.best.step:,}")
    svg = chart(f"{run.run} metric {name}", [*lines, Line(x, y)], marks)
    return Figure(name, ", ".join(summary), svg, tuple(legend))


def _own(line: Sequence[CheckpointReport]) -> list[CheckpointReport]:
    """Returns what was left behind of a line, and the checkpoint before it, where the lines part."""
    first = next(place for place, one in enumerate(line) if not one.on_line)
    return list(line[max(first - 1, 0) :])


def _apart(steps: Sequence[int]) -> list[int]:
    """Returns those of many steps that can be told apart on a chart."""
    apart = (max(steps) - min(steps)) / 150
    kept: list[int] = []
    for step in sorted(steps):
        if not kept or step - kept[-1] > apart:
            kept.append(step)
    return kept


def _xy(saves: Sequence[CheckpointReport], name: str) -> tuple[Numbers, Numbers]:
    return np.array([one.id.step for one in saves], np.float64), np.array(
        [one.metrics[name] for one in saves], np.float64
    )


def _dots(x: Numbers, y: Numbers) -> list[Marks]:
    return [Marks("checkpoint", x.tolist(), y.tolist())] if 0 < len(x) <= DOTS else []
