"""`tenuto simulate`: what failures cost a training on many machines."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.errors import UsageError

if TYPE_CHECKING:
    from tenuto.policy.prediction import Predictor
    from tenuto.policy.simulation import Job, Outcome

EXAMPLES = examples(
    "tenuto simulate --gpus 16384 --mtbf 3.09h --days 54",
    "tenuto simulate --mtbf 10m --memory 5s --replicas --days 3",
    "tenuto simulate --stall 2m --mtbf 12h --predictor 0.8,0.6,5m",
    "tenuto simulate --mtbf 6h --plot costs.svg",
)

_SAVE = "A save blocks training (0.2s); is durable (10s)."
_WORK = "Of useful work (30); for hours of all of them (1)."


def simulate(
    *,
    mtbf: Annotated[str, typer.Option(metavar="TIME", help="Between failures.")] = "3.09h",
    days: Annotated[float, typer.Option(metavar="N", help=_WORK, show_default=False)] = 30.0,
    gpus: Annotated[int, typer.Option(metavar="N", help=_WORK, show_default=False)] = 1,
    stall: Annotated[str, typer.Option(metavar="TIME", help=_SAVE, show_default=False)] = "0.2s",
    persist: Annotated[str, typer.Option(metavar="TIME", help=_SAVE, show_default=False)] = "10s",
    slowdown: Annotated[float, typer.Option(metavar="SHARE", help="Of training meanwhile.")] = 0.0,
    restart: Annotated[str, typer.Option(metavar="TIME", help="From a failure to the next step.")] = "60s",
    save: Annotated[str, typer.Option(metavar="TIME", help="Between saves; else the optimum.")] = "",
    memory: Annotated[str, typer.Option(metavar="TIME", help="Between states kept in memory.")] = "",
    memory_stall: Annotated[str, typer.Option(metavar="TIME", help="What one of them costs.")] = "0s",
    memory_restart: Annotated[str, typer.Option(metavar="TIME", help="From there.")] = "5s",
    node_share: Annotated[float, typer.Option(metavar="SHARE", help="Of failures that lose a node.")] = 0.25,
    replicas: Annotated[bool, typer.Option("--replicas", help="Others have in memory what it had.")] = False,
    predictor: Annotated[str, typer.Option(metavar="P,R,TIME", help="Of failures: precision, recall, lead.")] = "",
    shape: Annotated[float, typer.Option(metavar="K", help="Weibull shape of failures.")] = 1.0,
    seed: Annotated[int, typer.Option(metavar="N", help="For the times of failures.")] = 0,
    plot: Annotated[str, typer.Option(metavar="FILE", help="Draw it, as .svg or .png.")] = "",
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Find out what failures cost on many machines.

    Simulates it failure by failure: work, saves, what is lost, and restarts. Take the times from `tenuto bench` and
    your own training's `stats`. The effective training time ratio is useful work per time.
    """
    from tenuto.model.sizes import parse_time
    from tenuto.policy.interval import SaveCosts
    from tenuto.policy.simulation import Job
    from tenuto.policy.simulation import simulate as simulated

    def time_of(text: str, name: str) -> float:
        return 0.0 if text in ("0", "0s") else parse_time(text, name)

    if gpus < 1:
        raise UsageError(f"--gpus {gpus} makes no sense", subject="--gpus", hint="--gpus 1024")
    job = Job(
        work_s=days * 86_400,
        mtbf_s=parse_time(mtbf, "--mtbf"),
        costs=SaveCosts(time_of(stall, "--stall"), time_of(persist, "--persist"), slowdown),
        restart_s=time_of(restart, "--restart"),
        save_s=parse_time(save, "--save") if save else None,
        shape=shape,
        memory_s=parse_time(memory, "--memory") if memory else None,
        memory_stall_s=time_of(memory_stall, "--memory-stall"),
        memory_restart_s=time_of(memory_restart, "--memory-restart"),
        node_share=node_share,
        replicas=replicas,
        predictor=_predictor(predictor) if predictor else None,
    )
    found = simulated(job, seed)
    if plot:
        from tenuto.report.simulation_chart import draw

        draw(job, found, Path(plot), seed=seed)
    if json:
        output.document(
            "simulate", {**asdict(found), "ettr": found.ettr, "gpus": gpus, "seed": seed, "plot": plot or None}
        )
    else:
        _show(job, found, gpus)
        if plot:
            output.story(f"drawn: {plot}")


def _predictor(text: str) -> Predictor:
    """Returns the predictor of `0.8,0.6,5m`. Raises UsageError."""
    from tenuto.model.sizes import parse_time
    from tenuto.policy.prediction import Predictor

    try:
        precision, recall, lead = text.split(",")
        return Predictor(float(precision), float(recall), parse_time(lead, "--predictor"))
    except ValueError:
        hint = "--predictor 0.8,0.6,5m"
        raise UsageError(
            f"{text!r} is not a precision, a recall and a lead", subject="--predictor", hint=hint
        ) from None


def _show(job: Job, found: Outcome, gpus: int) -> None:
    from tenuto.policy.interval import waste
    from tenuto.policy.prediction import predicted_waste
    from tenuto.units import count, seconds

    def row(name: str, value_s: float) -> tuple[str, str]:
        hours = f", {value_s * gpus / 3600:,.0f} GPU hours" if gpus > 1 else ""
        return name, f"{value_s / found.elapsed_s:8.3%}  {seconds(value_s)}{hours}"

    per_day = found.failures / (found.elapsed_s / 86_400)
    memory = f", {found.from_memory:,} of them back from memory" if job.memory_s is not None else ""
    rows = [
        row("useful work", found.work_s),
        row("saving", found.saving_s),
        row("lost and done again", found.lost_s),
        row("down", found.down_s),
        ("failures", f"{count(found.failures, 'failure')}, {per_day:.1f} a day{memory}"),
        ("saves", f"after each {seconds(found.between_saves_s)} of work"),
    ]
    if (heeds := job.heeds) is not None:
        heeded = f"{found.alarms:,} heeded: a save where {seconds(heeds.stake_s)} of work are at stake, then"
        rows.append(("alarms", f"{heeded} after each {seconds(heeds.window_s)}"))
    elif job.predictor is not None:
        rows.append(("alarms", "not worth anything: they cost more than they keep, or come too late for a save"))
    if job.memory_s is None and job.shape == 1:
        if heeds is None or job.predictor is None:
            lost = waste(found.between_saves_s, job.costs, job.mtbf_s, job.restart_s)
        else:
            lost = predicted_waste(
                found.between_saves_s, job.costs, job.mtbf_s, job.predictor, restart_s=job.restart_s
            )  # fmt: skip
        rows.append(("expected", f"{1 - lost:8.3%}  by the closed form, without chance"))
    output.line(f"effective training time ratio {found.ettr:.4f}")
    output.line(output.rows(rows))
