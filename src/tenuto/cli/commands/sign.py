"""`tenuto sign`: vouches for a checkpoint with an Ed25519 key."""

from __future__ import annotations

from typing import Annotated

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import checkpoint, repository

EXAMPLES = examples(
    "tenuto sign /data/checkpoints 500 --key me.pem",
    "openssl genpkey -algorithm ed25519 -out me.pem   # makes a key",
    "tenuto verify /data/checkpoints --step 500 --signed-by me.pub",
)


def sign(
    where: options.Where,
    step: options.Checkpoint,
    *,
    run: options.Run = None,
    key: Annotated[
        str, typer.Option("--key", metavar="FILE", help="An Ed25519 private key: PEM, or as ssh-keygen writes it.")
    ],
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Sign every byte of a checkpoint, to show whose it is.

    The signature is a note beside the checkpoint, which needs permission to write. It hides nothing: anybody can read
    the checkpoint as before, and who has your public key can check that no byte of it was changed.
    """
    from tenuto.maintenance.sign import sign as sign_checkpoint
    from tenuto.seal.signing import read_signer

    signer = read_signer(key)
    repo = repository(where, acts=True)
    id = checkpoint(repo, run, step)
    note = sign_checkpoint(repo, id, signer)
    count = len(note.body["objects"])
    if json:
        output.document("sign", {"where": repo.url, "checkpoint": id, "public": signer.public, "objects": count})
    else:
        output.line(f"{id} is signed by {signer.public[:16]} ({count} objects, every byte)")
