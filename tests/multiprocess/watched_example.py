"""An example, run as it is: `watched_example.py NOTES KILLED SCRIPT WORD …` says beside it what each rank holds.

Rank r writes to NOTES.r, a line each time: what it holds when training begins, at each step that the examples save, and
at the end. What tensors are as a whole is torch's own word, Tenuto is not asked. With KILLED steps completed (0:
never), and the saves before them written, each rank kills itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import tenuto

SAVED_EVERY = 10
NOTES, KILLED = sys.argv[1], int(sys.argv[2])


def digest(whole: torch.Tensor) -> str:
    return hashlib.sha256(whole.detach().contiguous().numpy().tobytes()).hexdigest()


def digests(state: Mapping[str, Any]) -> dict[str, str]:
    """Of every tensor, by the path that it has in a checkpoint. All ranks have to come here."""
    model, optimizer = getattr(state["model"], "module", state["model"]), state["optimizer"]
    found = {}
    for name, parameter in model.named_parameters():
        own = optimizer.state.get(parameter, {})
        held = {f"model/{name}": parameter} | {f"optimizer/state/model/{name}/{key}": own[key] for key in own}
        for path, value in held.items():
            found[path] = digest(value.full_tensor() if isinstance(value, DTensor) else value)
    return found


class Watched(tenuto.Checkpointer):
    def __init__(self, where: Any, state: Mapping[str, Any], **more: Any) -> None:
        super().__init__(where, state, **more)
        self._held = state

    def steps(self, n: int | None = None) -> Any:
        loop = super().steps(n)
        self._note("began")
        return self._watched(loop)

    def _watched(self, loop: Iterator[int]) -> Iterator[int]:
        for step in loop:
            if step % SAVED_EVERY == 0:
                self._note("held")
            if KILLED and step == KILLED:
                self.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            yield step
        self._note("held")

    def _note(self, what: str) -> None:
        line = json.dumps({"what": what, "step": self.step, "digests": digests(self._held)})
        with Path(f"{NOTES}.{os.environ.get('RANK', '0')}").open("a") as notes:
            notes.write(f"{line}\n")


if __name__ == "__main__":
    sys.argv = sys.argv[3:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    tenuto.Checkpointer = Watched  # type: ignore[misc]
    runpy.run_path(sys.argv[0], run_name="__main__")
