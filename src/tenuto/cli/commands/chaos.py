"""`tenuto chaos`: a rehearsal: runs a training, injects faults, and says what they cost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.errors import UsageError

if TYPE_CHECKING:
    from tenuto.report.struck import Struck
    from tenuto.supervisor.chaos import Injector
    from tenuto.supervisor.supervise import Account

EXAMPLES = examples(
    "tenuto chaos --every 60s --faults 10 -- python train.py",
    "tenuto chaos --at 30s:kill,90s:stop,'step 400:nan' -- torchrun --nproc-per-node 2 train.py",
)


def chaos(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="What to run.")],
    *,
    every: Annotated[str, typer.Option(metavar="TIME", help="Between faults, on the average.")] = "60s",
    faults: Annotated[int, typer.Option(metavar="N", help="How many.")] = 5,
    kinds: Annotated[str, typer.Option(metavar="KINDS", help="Which, of those below.")] = "kill,stop",
    at: Annotated[str, typer.Option(metavar="WHEN:KIND,...", help="These, at times or steps, instead.")] = "",
    trace: Annotated[str, typer.Option(metavar="FILE", help="Those of this file, one a line, instead.")] = "",
    lasting: Annotated[str, typer.Option(metavar="TIME", help="How long a store or a network is bad.")] = "10s",
    hang: Annotated[str, typer.Option(metavar="TIME", help="As in `tenuto run`.")] = "",
    grace: Annotated[str, typer.Option(metavar="TIME", help="As in `tenuto run`.")] = "5s",
    seed: Annotated[int, typer.Option(metavar="N", help="For when, what and where.")] = 0,
    journal: Annotated[str, typer.Option(metavar="FILE", help="Where to note what happens.")] = "",
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Put faults into a training, and see what they cost.

    As `tenuto run`, with the table `[supervise]` of `tenuto.toml` and faults in the processes that train: kill, abort,
    stop (a signal), hang (a step that never ends), oom (an allocation that does not fit), nan (in the state),
    full-disk, slow-store (what is put there fails or takes longer), partition (nothing comes in from other ranks). Use
    a copy of your run, or a run of its own: the command trains and saves as it always does.
    """
    from tenuto.cli.commands import run
    from tenuto.model.sizes import parse_time
    from tenuto.report.struck import read_struck
    from tenuto.supervisor.chaos import Injector, drawn, traced, written
    from tenuto.supervisor.decide import Limits
    from tenuto.supervisor.supervise import Watch

    if faults < 1:
        raise UsageError(f"--faults {faults} makes no sense", subject="--faults", hint="--faults 5")
    if at and trace:
        raise UsageError("--at and --trace both say which faults", subject="--trace", hint="leave one of them out")
    lasts_s = parse_time(lasting, "--lasting")
    if trace:
        plan = traced(Path(trace), lasts_s)
    elif at:
        plan = written(at, lasts_s)
    else:
        plan = drawn(parse_time(every, "--every"), faults, kinds.split(","), seed, lasts_s)
    often = 10 * len(plan) + 10
    said = run.Supervision.of_settings()
    limits = Limits(
        restarts=often, per_hour=often, in_vain=5, first_wait_s=0.1, per_cause=said.rules.most, final=said.final
    )
    injector = Injector(plan, seed)
    watch = Watch(
        hang_s=run.hang_of(hang),
        grace_s=parse_time(grace, "--grace"),
        start_s=run.limit_of(said.start_within, "start_within"),
        end_s=run.limit_of(said.end_within, "end_within"),
    )
    account = run.supervised(
        command,
        limits,
        watch,
        journal=journal,
        json=json,
        at_end=run.flush_of(""),
        injector=injector,
        recovery=said.recovery(),
        notify=said.notify,
        watching=said.watching if said.given else None,
    )
    struck = read_struck(Path(account.journal)) if account.journal else []
    if json:
        told = {"injected": [one.document() for one in struck], "elapsed_s": account.elapsed_s}
        output.document("chaos", {**run.document_of(account), **told, "left": len(injector.faults)})
    else:
        _show(account, injector, struck)
    if account.status:
        raise typer.Exit(account.status)


def _show(account: Account, injector: Injector, struck: list[Struck]) -> None:
    from tenuto.units import count, seconds

    kinds = ", ".join(f"{number} x {kind}" for kind, number in Counter(one.kind for one in injector.injected).items())
    each = account.lost_s / max(account.restarts, 1)
    rows = [(one.kind or "no fault", _place(one) + one.words()) for one in struck]
    rows += [
        ("faults", f"{len(injector.injected)} injected ({kinds or 'none'}), {len(injector.faults)} left"),
        ("restarts", f"{account.restarts}"),
        ("lost", f"{seconds(account.lost_s)} of {seconds(account.elapsed_s)}, {seconds(each)} a restart"),
        ("came to", f"step {account.step}" if account.step is not None else count(0, "step")),
        ("ended", f"{account.reason}; status {account.status}"),
        ("journal", str(account.journal)),
    ]
    output.line(output.rows(rows))


def _place(one: Struck) -> str:
    from tenuto.units import seconds

    rank = f", rank {one.rank}" if one.rank else ""
    return f"{seconds(one.at_s)}, step {one.step}{rank}: " if one.step is not None else f"{seconds(one.at_s)}: "
