"""`tenuto pin`: keeps a checkpoint, whatever retention or `rm` would do."""

from __future__ import annotations

from typing import Annotated

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import checkpoint
from tenuto.errors import UsageError, typed

EXAMPLES = examples(
    'tenuto pin /data/checkpoints 500 --reason "figure 3"',
    'tenuto pin /data/checkpoints best:val_loss --hold --reason "audit until May"',
    "tenuto pin /data/checkpoints 500 --remove",
)


def pin(
    where: options.Where,
    step: options.Checkpoint,
    *,
    run: options.Run = None,
    hold: Annotated[bool, typer.Option("--hold", help="Put it on hold, which --remove alone does not end.")] = False,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; ls, log and show say it.")] = "",
    remove: Annotated[bool, typer.Option("--remove", help="Take the pin off, or end the hold with --hold.")] = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Keep a checkpoint.

    Neither the training's retention nor `keep` nor `rm`, even with --force, removes it as long as it is pinned or on
    hold. The two are apart so that what nobody may remove, as for an audit, does not end with a pin.
    """
    from tenuto.api.repository import Repository

    if remove and reason:
        raise UsageError(
            "--remove ends it: --reason has no effect with it",
            subject="--reason",
            hint=typed("tenuto", "pin", where, step, "--remove"),
        )
    there = Repository(where)
    id = checkpoint(there.repo, run, step)
    if remove:
        ended = there.release(id) if hold else there.unpin(id)
        reason = ended[0].reason
    elif hold:
        there.hold(id, reason=reason)
    else:
        there.pin(id, reason=reason)
    what = "on hold" if hold else "pinned"
    if json:
        kind = "hold" if hold else "pin"
        body = {"where": there.url, "checkpoint": id, "kind": kind, "reason": reason or None, "removed": remove}
        output.document("pin", body)
    else:
        output.line(f"{id} is {'no longer ' if remove else ''}{what}{f': {reason}' if reason and not remove else ''}")
