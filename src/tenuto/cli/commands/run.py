"""`tenuto run`: supervises a training."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.where import VARIABLE
from tenuto.errors import UsageError

if TYPE_CHECKING:
    from tenuto.supervisor.actions import Action
    from tenuto.supervisor.chaos import Injector
    from tenuto.supervisor.decide import Kind, Limits
    from tenuto.supervisor.detectors.contract import Name
    from tenuto.supervisor.journal import Journal
    from tenuto.supervisor.nodes import Nodes
    from tenuto.supervisor.risk.predict import RiskPredictor
    from tenuto.supervisor.strategies import Recovery, Rules
    from tenuto.supervisor.supervise import Account, Watch
    from tenuto.supervisor.watching import Watching

EXAMPLES = examples(
    "tenuto run -- python train.py",
    "tenuto run --hang 5m --deadline 11.5h -- torchrun --nproc-per-node 8 train.py",
    "tenuto run --on straggler=restart --record samples.jsonl -- python train.py",
)
_ENDS = "Ends in an hour (12), in a row in vain (3)."
_LEAVING = "To leave in (60s); after which it is asked to."
_LEFT = "Saves what is left there alone; if that fails."
_NODES = "Of the job, or `auto`; this one, from 0."
_PATIENCE = "For all to join (10m); with a silent one (30s)."
_WHICH = "Cloud (aws, gcp, azure), model of faults; `off`."
_FILES = "For what happens, and what is read of the machine."
REPLAYED = 50_000
"""Samples of a recording, the newest ones, that are looked at to know how good a predictor was: a second at most."""


def run(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="What to run.")],
    *,
    where: Annotated[str, typer.Option(metavar="DIR", help=_LEFT, envvar=VARIABLE)] = "",
    emergency: Annotated[list[str] | None, typer.Option("--emergency", metavar="DIR", help=_LEFT)] = None,
    restarts: Annotated[int, typer.Option(metavar="N", help="Restarts in all.")] = 100,
    per_hour: Annotated[int, typer.Option(metavar="N", help=_ENDS, show_default=False)] = 12,
    in_vain: Annotated[int, typer.Option(metavar="N", help=_ENDS, show_default=False)] = 3,
    hang: Annotated[str, typer.Option(metavar="TIME", help="Without a step; `off`; else learnt.")] = "",
    on: Annotated[
        list[str] | None, typer.Option("--on", metavar="CAUSE=HOW[:N]", help="What to do, N times an hour at most.")
    ] = None,
    start_within: Annotated[str, typer.Option(metavar="TIME", help="To its first step; `off`; else 2 h.")] = "",
    end_within: Annotated[str, typer.Option(metavar="TIME", help="From its last step; `off`; else 1 h to save.")] = "",
    notices: Annotated[str, typer.Option(metavar="WHICH", help=_WHICH)] = "",
    risk: Annotated[str, typer.Option(metavar="WHICH", help=_WHICH)] = "",
    ranks: Annotated[str, typer.Option(metavar="N,N,...", help="What {ranks} stands for; fewer after faults.")] = "",
    grace: Annotated[str, typer.Option(metavar="TIME", help=_LEAVING, show_default=False)] = "60s",
    deadline: Annotated[str, typer.Option(metavar="TIME", help=_LEAVING)] = "",
    nodes: Annotated[str, typer.Option(metavar="N", help=_NODES, show_default=False)] = "",
    node_rank: Annotated[int | None, typer.Option(metavar="N", help=_NODES)] = None,
    meet: Annotated[str, typer.Option(metavar="DIR", help="Shared by all nodes, which agree there.")] = "",
    join: Annotated[str, typer.Option(metavar="TIME", help=_PATIENCE, show_default=False)] = "10m",
    patience: Annotated[str, typer.Option(metavar="TIME", help=_PATIENCE, show_default=False)] = "30s",
    journal: Annotated[str, typer.Option(metavar="FILE", help=_FILES)] = "",
    record: Annotated[str, typer.Option(metavar="FILE", help=_FILES)] = "",
    notify: Annotated[
        list[str] | None, typer.Option("--notify", metavar="URL", help="Whom to tell, as apprise has it, or env:NAME.")
    ] = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Run a training, and restart it when it dies or hangs.

    By its own steps, its end, and what is found on the machine (memory, disks, GPUs, notices of a cloud); what is done
    goes by the cause, or by the finding. A signal is passed on. The exit status is the command's.
    """
    from tenuto.model.sizes import parse_time
    from tenuto.supervisor.decide import Limits
    from tenuto.supervisor.nodes import nodes_of
    from tenuto.supervisor.supervise import Watch, summary

    for name, value in (("--restarts", restarts), ("--per-hour", per_hour), ("--in-vain", in_vain)):
        if value < (0 if name == "--restarts" else 1):
            raise UsageError(f"{name} {value} makes no sense", subject=name, hint=f"{name} 3")
    said = Supervision.of_settings(
        on=on or (), notices=notices, record=record, risk=risk, notify=notify or (),
        start_within=start_within, end_within=end_within,
    )  # fmt: skip
    sizes = sizes_of(ranks, command)
    account = supervised(
        command,
        Limits(restarts, per_hour, in_vain, per_cause=said.rules.most, final=said.final),
        Watch(
            hang_s=hang_of(hang),
            grace_s=parse_time(grace, "--grace"),
            deadline_s=parse_time(deadline, "--deadline") if deadline else None,
            start_s=limit_of(said.start_within, "--start-within"),
            end_s=limit_of(said.end_within, "--end-within"),
        ),
        journal=journal,
        json=json,
        at_end=flush_of(where),
        emergency=emergency or (),
        recovery=said.recovery(sizes),
        notify=said.notify,
        watching=said.watching,
        nodes=nodes_of(
            nodes, node_rank, meet, sizes=sizes,
            first_s=parse_time(join, "--join"), patience_s=parse_time(patience, "--patience"),
        ),
    )  # fmt: skip
    if json:
        output.document("run", document_of(account))
    elif account.restarts or account.status:
        _line(summary(account))
        _line(f"journal: {account.journal}")
    if account.status:
        raise typer.Exit(account.status)


@dataclass(frozen=True)
class Supervision:
    """What is done about ends and findings, by options and the settings file. `given`: whether the file says
    anything."""

    rules: Rules
    answers: Mapping[Name, Action]
    notices: str
    record: str
    risk: str
    notify: Sequence[str]
    start_within: str
    end_within: str
    given: bool

    @classmethod
    def of_settings(
        cls,
        *,
        on: Sequence[str] = (),
        notices: str = "",
        record: str = "",
        risk: str = "",
        notify: Sequence[str] = (),
        start_within: str = "",
        end_within: str = "",
    ) -> Supervision:
        """Returns what the options say, and where they do not the table `supervise` of the settings file. Raises
        UsageError."""
        from tenuto.supervisor import actions
        from tenuto.supervisor.strategies import written

        settings = _settings()
        answers, causes = actions.written([*settings.get("on", ()), *on])
        return cls(
            written(causes),
            answers,
            notices or settings.get("notices", "auto"),
            record or settings.get("record", ""),
            risk or settings.get("risk", "rules"),
            notify or settings.get("notify", ()),
            start_within or settings.get("start_within", ""),
            end_within or settings.get("end_within", ""),
            bool(settings),
        )

    @property
    def final(self) -> list[Kind]:
        """The causes after which it is not started again."""
        return [cause for cause, strategy in self.rules.table.items() if strategy == "stop"]

    def recovery(self, sizes: Sequence[int] = ()) -> Recovery:
        from tenuto.cli.console import remedies
        from tenuto.supervisor.strategies import Recovery

        return Recovery(self.rules, remedies.roll_back, remedies.repair, list(sizes))

    def watching(self, journal: Journal) -> Watching:
        """Returns what watches the machine."""
        return watching_by(self.answers, journal, notices=self.notices, record=self.record, risk=self.risk)


def flush_of(where: str) -> Callable[[Sequence[str], Sequence[str]], str | None]:
    """Returns what saves what is left in memory at the end: to `where`, or to what was trained, else to the emergency
    places."""
    from tenuto.cli.console import remedies

    return lambda places, emergency: remedies.flush([where] if where else places, emergency, _line)


def hang_of(text: str) -> float | None:
    """Returns `--hang` in seconds: 0 for never, None for what is learnt."""
    return limit_of(text, "--hang")


def limit_of(text: str, option: str) -> float | None:
    """Returns a limit in seconds: 0 for `off`, None where nothing is said. Raises UsageError."""
    from tenuto.model.sizes import parse_time

    return None if not text else 0.0 if text == "off" else parse_time(text, option)


def watching_by(answers: Mapping[Name, Action], journal: Journal, *, notices: str, record: str, risk: str) -> Watching:
    """Returns what watches the machine, with its sampling process begun. Raises UsageError."""
    from tenuto.supervisor.detectors.registry import detectors
    from tenuto.supervisor.detectors.sampling import SamplingProcess
    from tenuto.supervisor.watching import Recorder, Watching

    watched = detectors(notices)
    predictor = predictor_of(risk, record)
    try:
        recorder = Recorder(Path(record), _line) if record else None
    except OSError as error:
        raise UsageError(
            f"{record} cannot be written: {(error.strerror or '').lower()}",
            subject="--record",
            hint="tenuto run --record samples.jsonl -- python train.py",
        ) from None
    return Watching(watched, journal, _line, answers, SamplingProcess(notices, _line), recorder, predictor)


def predictor_of(risk: str, record: str) -> RiskPredictor | None:
    """Returns what foresees faults by `rules` or a model, and knows from the recording so far, if there is one, how
    good it was; None for `off`. Raises UsageError for a model that cannot be read; a recording that cannot be is said,
    and keeps no training from starting."""
    from tenuto.supervisor.risk.model import load
    from tenuto.supervisor.risk.predict import ModelScorer, RiskPredictor, rules
    from tenuto.supervisor.risk.recording import read_recording

    if risk == "off":
        return None
    found = RiskPredictor(rules() if risk == "rules" else ModelScorer(load(Path(risk))))
    if record and Path(record).exists():
        try:
            found.replay(read_recording(Path(record), newest=REPLAYED))
        except UsageError as error:
            _line(f"how good alarms were so far is not known: {error.message}")
    return found


def _settings() -> Mapping[str, Any]:
    """Returns the table `supervise` of the settings file, if there is one. Raises UsageError, with the line, for what
    is wrong in it."""
    from tenuto.training.config.document import document, find

    path = find()
    if path is None:
        return {}
    found = document(path)
    found.check("supervise")
    settings: Mapping[str, Any] = found.values.get("supervise", {})
    return settings


def sizes_of(text: str, command: Sequence[str]) -> list[int]:
    """Returns the numbers of ranks of `--ranks`, the largest first. Raises UsageError where the command has no place
    for them, or none is given for one that it has."""
    from tenuto.supervisor.strategies import RANKS

    there = any(RANKS in word for word in command)
    sizes = sorted({int(one) for one in text.split(",") if one.strip().isdecimal()}, reverse=True)
    if bool(text) != there or bool(text) != bool(sizes) or 0 in sizes:
        raise UsageError(
            f"--ranks {text or 'is missing'}, and the command {'has' if there else 'has no'} {RANKS}",
            subject="--ranks",
            hint="tenuto run --ranks 8,4 -- torchrun --nproc-per-node {ranks} train.py",
        )
    return sizes


def supervised(
    command: Sequence[str],
    limits: Limits,
    watch: Watch,
    *,
    journal: str,
    json: bool,
    at_end: Callable[[Sequence[str], Sequence[str]], str | None] = lambda places, emergency: None,
    recovery: Recovery | None = None,
    notify: Sequence[str] = (),
    injector: Injector | None = None,
    watching: Callable[[Journal], Watching] | None = None,
    emergency: Sequence[str] = (),
    nodes: Nodes | None = None,
) -> Account:
    """Runs a command to its end, with a line on stderr for what happens. `emergency`: places for what trains there,
    where its script names none. Raises UsageError where it cannot be run."""
    from tenuto.supervisor.journal import Journal, default_path
    from tenuto.supervisor.notify import Notifier, urls_of
    from tenuto.supervisor.strategies import Recovery
    from tenuto.supervisor.supervise import Supervisor
    from tenuto.telemetry.heartbeat import CHAOS, EMERGENCY

    environment = {name: value for name, value in os.environ.items() if name != CHAOS}
    environment |= {CHAOS: "1"} if injector is not None else {}
    environment |= {EMERGENCY: ";".join(emergency)} if emergency else {}
    path = Path(journal) if journal else default_path(os.getpid())
    noted = Journal(path, _line)
    supervisor = Supervisor(
        command, limits, watch, noted, _line, at_end=at_end, quiet_stdout=json, injector=injector,
        recovery=recovery or Recovery(), environment=environment, nodes=nodes,
    )  # fmt: skip
    supervisor.watching = watching(noted) if watching is not None else None
    notifier: Notifier | None = None
    try:
        if notify:
            notifier = Notifier(urls_of(notify), command, _line)
            noted.listen = notifier.take
        return supervisor.run()
    except (FileNotFoundError, PermissionError) as error:
        raise UsageError(
            f"{command[0]} cannot be run: {(error.strerror or '').lower()}",
            subject=command[0],
            hint="tenuto run -- python train.py",
        ) from None
    finally:
        if supervisor.watching is not None:
            supervisor.watching.close()
        if nodes is not None:
            nodes.close()
        if notifier is not None:
            notifier.close()


def _line(text: str) -> None:
    """Says it between the lines of the command itself."""
    output.story(f"tenuto: {text}")


def document_of(account: Account) -> dict[str, Any]:
    return {
        "status": account.status,
        "reason": account.reason,
        "restarts": account.restarts,
        "lost_s": account.lost_s,
        "step": account.step,
        "journal": account.journal,
        "sampling_cpu_s": account.sampling_cpu_s,
        "starts": [
            {"kind": one.kind, "status": one.status, "evidence": one.evidence, "seconds": one.ended_s - one.began_s,
             "step": one.step, "new": one.new}
            for one in account.endings
        ],
    }  # fmt: skip
