"""Counts what one steady save and one restore call of our own: `python benchmarks/call_trace.py`.

Prints, for the training thread up to the first copied byte and for all threads up to the commit: calls, functions,
files, changes from one package to another, and the objects that hand the save to one another on the way.
It measures structure, not time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import tenuto
from tenuto.engine.staging.capture import Capturer

ROOT = str(Path(tenuto.__file__).parent) + "/"
STEPS = 6


class Trace:
    """Calls of functions below `ROOT`, while `counting`, on all threads or on one."""

    def __init__(self) -> None:
        self.calls: dict[int, list[tuple[str, str]]] = {}
        self.counting = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and self.counting and frame.f_code.co_filename.startswith(ROOT):
            file = frame.f_code.co_filename.removeprefix(ROOT)
            self.calls.setdefault(threading.get_ident(), []).append((file, frame.f_code.co_qualname))

    def summary(self, thread: int | None = None) -> dict[str, int]:
        """Of one thread, or of all."""
        calls = [call for ident, found in self.calls.items() if thread in (None, ident) for call in found]
        packages = [file.rpartition("/")[0] for file, _ in calls]
        return {
            "calls": len(calls),
            "functions": len(set(calls)),
            "files": len({file for file, _ in calls}),
            "package changes": sum(a != b for a, b in pairwise(packages)),
        }


def objects_on_the_stack() -> list[str]:
    """The classes of the objects whose methods are being called here, the outermost first."""
    names: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(ROOT) and "self" in frame.f_locals:
            names.append(type(frame.f_locals["self"]).__name__)
        frame = frame.f_back
    return list(dict.fromkeys(reversed(names)))


def traced(work: Callable[[Trace], None]) -> Trace:
    """Runs `work` under a profile function on every thread, also those that run already."""
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        work(trace)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return trace


def save_steadily(where: Path) -> dict[str, Any]:
    """Traces the last of some saves of five leaves, taken by a loop that says when a step is done."""
    state = {f"leaf{number}": np.zeros(1000, np.float32) for number in range(5)}
    found: dict[str, Any] = {}
    before_copy = Trace()
    copy = Capturer.capture

    def copying(self: Capturer, *words: Any, **more: Any) -> Any:
        if trace.counting and not before_copy.calls:
            before_copy.calls = {ident: list(calls) for ident, calls in trace.calls.items()}
            found["objects on the stack at the first byte"] = objects_on_the_stack()
        return copy(self, *words, **more)

    def train(running: Trace) -> None:
        nonlocal trace
        trace = running
        Capturer.capture = copying  # type: ignore[method-assign]
        with tenuto.Checkpointer(where, state, save=tenuto.every(steps=1), keep=tenuto.keep.latest(3)) as ckpt:
            ckpt.restore()
            for step in range(1, STEPS + 1):
                for leaf in state.values():
                    leaf += 1
                running.counting = step == STEPS
                ckpt.step_done(step)
                ckpt.wait()
                running.counting = False

    trace = Trace()
    try:
        running = traced(train)
    finally:
        Capturer.capture = copy  # type: ignore[method-assign]
    main = threading.get_ident()
    first = {"step_done to the first byte, training thread": before_copy.summary(main)}
    return first | found | {"step_done to the commit and what follows it, all threads": running.summary()}


def restore(where: Path) -> dict[str, Any]:
    target = {f"leaf{number}": np.zeros(1000, np.float32) for number in range(5)}

    def load(trace: Trace) -> None:
        trace.counting = True
        tenuto.load(where, target)
        trace.counting = False

    return {"a one-off load": traced(load).summary()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = save_steadily(Path(directory) / "place") | restore(Path(directory) / "place")
    for what, value in found.items():
        print(f"{what}: {value if isinstance(value, list) else ', '.join(f'{n} {k}' for k, n in value.items())}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
