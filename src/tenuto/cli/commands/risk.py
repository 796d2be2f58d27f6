"""`tenuto risk`: trains and evaluates what foresees faults, and imports failure logs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.errors import UsageError

if TYPE_CHECKING:
    from tenuto.supervisor.detectors.contract import Sample
    from tenuto.supervisor.risk.evaluate import Report
    from tenuto.supervisor.risk.predict import Scorer

EXAMPLES = examples(
    "tenuto risk eval rules telemetry.jsonl",
    "tenuto risk train telemetry.jsonl -o model.json",
    "tenuto risk import --format backblaze 2024-03-25.csv -o drives",
)
RULES = "rules"


class Action(StrEnum):
    """The actions on predictors and their recordings."""

    train = "train"
    eval = "eval"
    import_ = "import"


def risk(
    action: Annotated[Action, typer.Argument(metavar="train|eval|import", help="What to do.", show_default=False)],
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...", help="Recordings, or directories of them; eval: MODEL or `rules` first.",
            show_default=False,
        ),
    ],
    *,
    to: Annotated[str, typer.Option("--output", "-o", metavar="PATH", help="train: the model; import: a directory.")]
    = "",
    trees: Annotated[bool, typer.Option("--trees", help="train: boosted trees, not a logistic regression.")] = False,
    horizon: Annotated[str, typer.Option(metavar="TIME", help="train: how soon a fault counts.")] = "10m",
    window: Annotated[str, typer.Option(metavar="TIME", help="train: how far back it looks.")] = "10m",
    format: Annotated[
        str, typer.Option(metavar="NAME", help="import: backblaze, lanl, nvidia-smi or journal.")
    ] = "",
    ends: Annotated[str, typer.Option(metavar="JOURNAL", help="import: ends of a training, for each thing.")] = "",
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:  # fmt: skip
    """Foresee faults: train, evaluate, import logs.

    Recordings are those of `tenuto run --record`. A model is trained on the earlier part of them, and evaluated on what
    came later.
    """
    from tenuto.supervisor.risk.recording import read_all

    _check(action, files, to, format, {"--trees": trees, "--ends": bool(ends)})
    paths = [Path(file) for file in files]
    if action is Action.import_:
        _import(paths, format, Path(to), ends, json)
    elif action is Action.train:
        _train(read_all(paths), Path(to), trees, (horizon, window), json)
    else:
        scorer, since = _scorer(files[0])
        _show(files[0], _evaluated(read_all(paths[1:]), scorer, since), json)


def _check(action: Action, files: Sequence[str], to: str, format: str, given: dict[str, bool]) -> None:
    """Raises UsageError for an option that this action does not take, or lacks."""
    if (action is not Action.eval) != bool(to):
        hint = "tenuto risk train telemetry.jsonl -o model.json"
        raise UsageError("-o is for train and import, which need it", subject="-o", hint=hint)
    if (action is Action.import_) != bool(format):
        hint = "tenuto risk import --format backblaze FILE -o DIRECTORY"
        raise UsageError("--format is for import, which needs it", subject="--format", hint=hint)
    owner = {"--trees": Action.train, "--ends": Action.import_}
    for name in (name for name, is_given in given.items() if is_given and owner[name] is not action):
        raise UsageError(f"{name} has no effect with {action}", subject=name, hint="tenuto risk --help")
    if action is Action.eval and len(files) < 2:
        raise UsageError("eval needs MODEL or `rules`, and recordings", hint="tenuto risk eval rules telemetry.jsonl")


def _import(paths: Sequence[Path], format: str, to: Path, ends: str, json: bool) -> None:
    from tenuto.supervisor.risk.imports import import_log
    from tenuto.supervisor.risk.recording import write_recording
    from tenuto.units import count

    more = import_log(Path(ends), "journal")["job"] if ends else []
    found: dict[str, list[Sample]] = {}
    for path in paths:
        for thing, samples in import_log(path, format).items():
            found.setdefault(thing, []).extend(samples)
    faults = 0
    for thing, samples in found.items():
        whole = sorted([*samples, *more], key=lambda sample: sample.at)
        faults += sum(sample.kind is not None for sample in whole)
        write_recording(to / f"{''.join(one if one.isalnum() or one in '-_' else '_' for one in thing)}.jsonl", whole)
    samples_in_all = sum(map(len, found.values()))
    if json:
        output.document(
            "risk", {"directory": str(to), "things": len(found), "samples": samples_in_all, "ends": faults}
        )  # fmt: skip
    else:
        output.line(f"{to}: {count(samples_in_all, 'sample')} of {count(len(found), 'thing')}, {count(faults, 'end')}")


def _train(recordings: Sequence[Sequence[Sample]], to: Path, trees: bool, times: tuple[str, str], json: bool) -> None:
    from tenuto.model.sizes import parse_time
    from tenuto.supervisor.risk.predict import ModelScorer
    from tenuto.supervisor.risk.train import train

    horizon_s, window_s = parse_time(times[0], "--horizon"), parse_time(times[1], "--window")
    model, split = train(recordings, "trees" if trees else "logistic", horizon_s, window_s)
    try:
        to.write_text(model.text())
    except OSError as error:
        hint = "-o FILE, in a directory that can be written"
        raise UsageError(f"{to} cannot be written: {error.strerror}", subject=str(to), hint=hint) from None
    if not json:
        known = model.trained
        output.line(
            f"{to}: {model.kind}, {len(model.features)} features, {known['moments']:,} moments, "
            f"{known['before_a_fault']:,} of them before a fault; alarms from {model.threshold:g} on"
        )
    _show(str(to), _evaluated(recordings, lambda: ModelScorer(model), split), json)


def _scorer(name: str) -> tuple[Callable[[], Scorer], float]:
    """Returns what makes a scorer of rules or of a model's file, and until when the model was trained."""
    from tenuto.supervisor.risk.model import load
    from tenuto.supervisor.risk.predict import ModelScorer, rules

    if name == RULES:
        return rules, float("-inf")
    model = load(Path(name))
    return (lambda: ModelScorer(model)), float(model.trained.get("until", float("-inf")))


def _evaluated(recordings: Sequence[Sequence[Sample]], scorer: Callable[[], Scorer], since: float) -> Report:
    """Evaluates on what the model has not seen. Raises UsageError where that is nothing."""
    from tenuto.supervisor.risk.evaluate import evaluate

    if all(samples[-1].at < since for samples in recordings):
        raise UsageError(
            "the model was trained on all of it", hint="tenuto risk eval MODEL FILE, with a newer recording"
        )
    return evaluate(recordings, scorer, since)


def _show(name: str, found: Report, json: bool) -> None:
    if json:
        rates = {"precision": found.precision, "recall": found.recall, "lead_s": found.lead_s}
        output.document("risk", {"predictor": name, **rates, **asdict(found)})
        return
    from tenuto.units import count, seconds

    def share(value: float | None) -> str:
        return "unknown" if value is None else f"{value:.2f}"

    span = [time.strftime("%Y-%m-%d %H:%M", time.gmtime(at)) for at in (found.since, found.until)]
    rows: list[tuple[str, Any]] = [
        ("evaluated on", f"{span[0]} to {span[1]} UTC, {count(found.faults, 'fault')}"),
        ("alarms", f"{found.alarms}, {found.right} of them right"),
        ("precision", share(found.precision)),
        ("recall", share(found.recall)),
    ]
    if found.leads_s:
        leads = f"{seconds(found.lead_s or 0.0)} in the median, {seconds(min(found.leads_s))} at least"
        rows.append(("lead", leads))
    if found.brier is not None and found.brier_base is not None:
        rows.append(("Brier score", f"{found.brier:.3f}; {found.brier_base:.3f} by the share of moments alone"))
    for number, one in enumerate(found.calibration):
        text = f"{one.low:.1f} to {one.high:.1f}: a fault after {one.observed:.2f} of {count(one.moments, 'moment')}"
        rows.append(("probability" if number == 0 else "", text))
    output.line(output.rows(rows))
