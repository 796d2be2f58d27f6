"""`tenuto demo --storm`: one training through mixed faults, under its supervisor, compared with an undisturbed one.

Faults inside the training are those of `tenuto chaos`, each at a step. The others strike from outside: the supervisor
is asked to leave as before a preemption, or killed; and a bit of the newest checkpoint flips while a node is lost with
its memory. It is started again as a scheduler would.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tenuto.demo.comparison import Comparison, compare, read
from tenuto.demo.report import PIPE_WIDTH
from tenuto.demo.runner import UNTOUCHED, ReportProgress, TrainingFailed
from tenuto.engine.staging import slots
from tenuto.errors import typed
from tenuto.record import record
from tenuto.repo.lineage import resolve
from tenuto.repo.repository import Repo
from tenuto.report.struck import read_struck
from tenuto.store.registry import open_store
from tenuto.units import count, seconds

RUN: Final = "storm"
Legs = Sequence[tuple[Sequence[str], str]]
LEGS: Final[Legs] = (
    (("kill", "slow-store", "oom"), "preemption"),
    (("full-disk", "stop", "nan"), "flipped byte"),
    (("abort", "hang"), "kill supervisor"),
    ((), ""),
)
"""Faults inside the training, and what ends its supervisor after them; the last one ends by itself."""
SHORT: Final[Legs] = ((("kill", "nan"), "flipped byte"), ((), ""))
FROM_OUTSIDE: Final = {
    "preemption": "SIGTERM to the supervisor: the training saved and left",
    "flipped byte": "SIGTERM, the node's memory lost, a bit of the newest checkpoint flipped: the one before restored",
    "kill supervisor": "kill -9 of the supervisor: the training saved and left",
}
LASTS: Final = "1s"
HANG: Final = "5s"
LONGEST_S: Final = 300.0
"""Without a step or an end: something is stuck."""
POLL_S: Final = 0.05
_COUNTER: Final = struct.Struct("qq")


@record
class Blow:
    """A fault and what became of it. again: steps trained again. lost_s: until training was as far again."""

    kind: str
    step: int
    what: str
    again: int = 0
    lost_s: float = 0.0

    def words(self) -> str:
        if not self.lost_s:
            return self.what
        return f"{self.what}; {count(self.again, 'step')} again, as far after {seconds(self.lost_s)}"


@record
class Stormed:
    """What became of a training in a storm. ettr: the share of its time in which it came to new steps."""

    blows: Sequence[Blow]
    comparison: Comparison
    steps: int
    ettr: float
    seconds: float

    def document(self) -> dict[str, Any]:
        compared = {**asdict(self.comparison), "equal": self.comparison.equal}
        told = {"steps": self.steps, "ettr": self.ettr, "seconds": self.seconds}
        return {**compared, "faults": [asdict(one) for one in self.blows], **told}

    def show(self) -> None:
        """Prints a line for each fault, and the verdict."""
        table = Table.grid(padding=(0, 2))
        for one in self.blows:
            table.add_row(Text(one.kind, style="bold"), Text(f"step {one.step}", style="dim"), one.words())
        equal = self.comparison.equal
        mark = Text("EQUAL" if equal else "DIFFERENT", style="bold green" if equal else "bold red")
        what = "in exactly the state of a training that nothing disturbed, bit for bit"
        if not equal:
            what = f"in another state than a training that nothing disturbed: {self.comparison.difference}"
        again = sum(one.again for one in self.blows)
        console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
        console.print(table)
        console.print(
            f"\n{count(len(self.blows), 'fault')} in {seconds(self.seconds)}; {count(again, 'step')} of {self.steps} "
            f"trained again; {self.ettr:.0%} of the time went into new steps"
        )
        console.print(Text.assemble(mark, f"  It ended {what}."))


@dataclass
class Storm:
    """Runs a storm in an empty directory. `memory`: of `own_shared_memory`; what lies there is lost with a node."""

    place: Path
    steps: int
    save_every: int
    on_progress: ReportProgress
    legs: Legs = LEGS
    memory: Path | None = None
    _blows: list[Blow] = field(default_factory=list)
    _down: tuple[Blow, float] | None = None
    """What has struck from outside, and when, until training is as far again."""
    _process: subprocess.Popen[bytes] | None = None
    """The newest training or supervisor."""

    def run(self) -> Stormed:
        """Raises TrainingFailed where a training or its supervisor fails for a reason of its own. Leaves none behind
        where it is broken off."""
        try:
            return self._run()
        finally:
            if self._process is not None and self._process.poll() is None:
                self._process.terminate()
                self._process.wait(LONGEST_S)

    def _run(self) -> Stormed:
        self._follow(self._start(self._training(UNTOUCHED)), UNTOUCHED, "training untouched")
        began_s = time.monotonic()
        number = sum(len(inside) + bool(end) for inside, end in self.legs)
        due = iter([self.steps * (one + 1) // (number + 2) for one in range(number)])
        for leg, (inside, end) in enumerate(self.legs):
            faults = [{"step": next(due), "kind": kind, "lasts": LASTS} for kind in inside]
            self._leg(leg, faults, end, next(due) if end else self.steps + 1)
        took_s = time.monotonic() - began_s
        repo = Repo.open(open_store(self.place / "checkpoints"))
        comparison = compare(read(repo, UNTOUCHED), read(repo, RUN))
        ettr = 1 - sum(one.lost_s for one in self._blows) / took_s
        return Stormed(self._blows, comparison, self.steps, ettr, took_s)

    def _leg(self, leg: int, faults: Sequence[dict[str, Any]], end: str, at: int) -> None:
        """Trains under a supervisor until that ends, or `end` strikes it at step `at`."""
        trace, journal = self.place / f"faults-{leg}.jsonl", self.place / f"journal-{leg}.jsonl"
        trace.write_text("".join(f"{json.dumps(one)}\n" for one in faults))
        options = ["--trace", str(trace), "--hang", HANG, "--grace", "5s", "--journal", str(journal)]
        supervisor = self._start([sys.executable, "-m", "tenuto", "chaos", *options, "--", *self._training(RUN)])
        reached = self._follow(supervisor, RUN, f"training in a storm, {len(self._blows)} faults behind it", at)
        if reached:
            self._strike(supervisor, end, reached)
        inside = [
            Blow(one.kind or "no fault", one.step or 0, one.words(cost=False), out.lost_steps or 0, out.lost_s or 0.0)
            if (out := one.outage)
            else Blow(one.kind, one.step or 0, one.words())
            for one in read_struck(journal)
        ]
        self._blows += inside

    def _strike(self, supervisor: subprocess.Popen[bytes], end: str, step: int) -> None:
        at_s = time.monotonic()
        supervisor.send_signal(signal.SIGKILL if end == "kill supervisor" else signal.SIGTERM)
        supervisor.wait(LONGEST_S)
        if end == "flipped byte":
            for image in self.memory.iterdir() if self.memory is not None else ():
                shutil.rmtree(image, ignore_errors=True)
            self._flip()
        (self.place / f"{RUN}.counter").unlink()  # the next process counts in one of its own
        self._down = Blow(end, step, FROM_OUTSIDE[end]), at_s

    def _flip(self) -> None:
        """Flips a bit in the middle of the largest file of the newest checkpoint."""
        newest = resolve(Repo.open(open_store(self.place / "checkpoints")), RUN, "latest")
        files = self.place.glob(f"checkpoints/runs/{RUN}/*/step-{newest.step:08d}/*.safetensors")
        with open(max(files, key=lambda file: file.stat().st_size), "r+b") as file:
            file.seek(os.fstat(file.fileno()).st_size // 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))

    def _training(self, run: str) -> list[str]:
        told = (self.place, run, self.steps, self.save_every, slots.SHARED_MEMORY)
        return [sys.executable, "-m", "tenuto.demo.storm", *map(str, told)]

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with open(self.place / "output.txt", "ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output)
        return self._process

    def _follow(self, process: subprocess.Popen[bytes], run: str, activity: str, at: int | None = None) -> int:
        """Follows a training until it comes to step `at`, which is returned, or its process ends well (0)."""
        last, since_s = 0, time.monotonic()
        while process.poll() is None:
            first, step = self._counted(run)
            if step != last:
                last, since_s = step, time.monotonic()
            elif time.monotonic() - since_s > LONGEST_S:
                process.terminate()
            self.on_progress(activity, step, self.steps)
            self._note_recovery(first, step)
            if at is not None and step >= at and self._down is None:
                return step
            time.sleep(POLL_S)
        if process.returncode:
            output = self.place / "output.txt"
            raise TrainingFailed(
                f"{activity}: it ended with status {process.returncode}",
                subject=str(output),
                hint=f"see its output: {typed('tail', output)}",
            )
        return 0

    def _note_recovery(self, first: int, step: int) -> None:
        if self._down is None or step <= self._down[0].step:
            return
        blow, at_s = self._down
        self._down = None
        again = max(blow.step - first + 1, 0)
        self._blows.append(Blow(blow.kind, blow.step, blow.what, again, time.monotonic() - at_s))

    def _counted(self, run: str) -> tuple[int, int]:
        """Returns the first and the last step that the newest process has completed."""
        data = (self.place / f"{run}.counter").read_bytes() if (self.place / f"{run}.counter").exists() else b""
        return _COUNTER.unpack(data) if len(data) == _COUNTER.size else (0, 0)


def main() -> None:
    """Trains, as the command under the supervisor: PLACE RUN STEPS SAVE_EVERY MEMORY."""
    import numpy as np
    import torch

    from tenuto import every
    from tenuto.demo import train_gpt

    place, run, (steps, save_every) = Path(sys.argv[1]), sys.argv[2], map(int, sys.argv[3:5])
    slots.SHARED_MEMORY = sys.argv[5]  # type: ignore[misc]
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    with open(place / f"{run}.counter", "w+b") as file:
        file.truncate(_COUNTER.size)
        counter = mmap.mmap(file.fileno(), _COUNTER.size)
    first: list[int] = []

    def on_step(step: int, loss: float) -> None:
        first.append(step)
        del first[1:]
        _COUNTER.pack_into(counter, 0, first[0], step)

    options = {"memory": every(steps=1), "on_unhealthy": "stop"}
    train_gpt.train(str(place / "checkpoints"), run=run, steps=steps, save_every=save_every, on_step=on_step, **options)


if __name__ == "__main__":
    main()
