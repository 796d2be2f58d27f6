"""Retries say nothing of their own on stderr."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
from tenuto.errors import StoreUnavailable
from tenuto.store.wrappers.retry import Patience
failing = [StoreUnavailable("busy", subject="x")]
def work():
    if failing:
        raise failing.pop()
    return "done"
def again():
    failing.append(StoreUnavailable("busy", subject="x")) if len(calls) < 2 else None
    calls.append(1)
    return work()
calls = []
print(Patience(wait_s=0.0)(again))
"""


def test_a_program_without_logging_sees_no_line_of_a_retry() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == ("done\n", "")
