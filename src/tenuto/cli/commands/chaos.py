"""`tenuto chaos`: a rehearsal: runs a training, injects faults, and says what they cost."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.errors import UsageError

if TYPE_CHECKING:
    from tenuto.supervisor.chaos import Injector
    from tenuto.supervisor.supervise import Account

EXAMPLES = examples(
    "tenuto chaos --every 60s --faults 10 -- python train.py",
    "tenuto chaos --at 30s:kill,90s:stop -- torchrun --nproc-per-node 2 train.py",
)


def chaos(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="What to run.")],
    *,
    every: Annotated[str, typer.Option(metavar="TIME", help="Between faults, on the average.")] = "60s",
    faults: Annotated[int, typer.Option(metavar="N", help="How many.")] = 5,
    kinds: Annotated[str, typer.Option(metavar="KINDS", help="Of kill, abort and stop.")] = "kill,stop",
    at: Annotated[str, typer.Option(metavar="TIME:KIND,...", help="These, at these times, instead.")] = "",
    hang: Annotated[str, typer.Option(metavar="TIME", help="As in `tenuto run`.")] = "",
    seed: Annotated[int, typer.Option(metavar="N", help="For when, what and where.")] = 0,
    journal: Annotated[str, typer.Option(metavar="FILE", help="Where to note what happens.")] = "",
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Kill and stop a training, and see what it costs.

    As `tenuto run`, with faults put into the processes that train. Use a copy of your run, or a run of its own: the
    command trains and saves as it always does.
    """
    from tenuto.cli.commands.run import document_of, hang_of, supervised
    from tenuto.model.sizes import parse_time
    from tenuto.supervisor.chaos import Injector, drawn, written
    from tenuto.supervisor.decide import Limits
    from tenuto.supervisor.supervise import Watch

    if faults < 1:
        raise UsageError(f"--faults {faults} makes no sense", subject="--faults", hint="--faults 5")
    plan = written(at) if at else drawn(parse_time(every, "--every"), faults, kinds.split(","), seed)
    often = 10 * len(plan) + 10
    limits = Limits(restarts=often, per_hour=often, in_vain=5, first_wait_s=0.1)
    injector, watch = Injector(plan, seed), Watch(hang_s=hang_of(hang), grace_s=5.0)
    account = supervised(command, limits, watch, journal=journal, json=json, injector=injector)
    if json:
        injected = [{"at_s": one.at_s, "kind": one.kind} for one in injector.injected]
        output.document("chaos", {**document_of(account), "injected": injected, "elapsed_s": account.elapsed_s})
    else:
        _show(account, injector)
    if account.status:
        raise typer.Exit(account.status)


def _show(account: Account, injector: Injector) -> None:
    from tenuto.units import count, seconds

    kinds = ", ".join(f"{number} x {kind}" for kind, number in Counter(one.kind for one in injector.injected).items())
    each = account.lost_s / max(account.restarts, 1)
    rows = [
        ("faults", f"{len(injector.injected)} injected ({kinds or 'none'}), {len(injector.faults)} left"),
        ("restarts", f"{account.restarts}"),
        ("lost", f"{seconds(account.lost_s)} of {seconds(account.elapsed_s)}, {seconds(each)} a restart"),
        ("came to", f"step {account.step}" if account.step is not None else count(0, "step")),
        ("ended", f"{account.reason}; status {account.status}"),
        ("journal", str(account.journal)),
    ]
    output.line(output.rows(rows))
