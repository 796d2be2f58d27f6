"""Signals at lines of a save's way: a short slice of `campaigns.signals`, and bugs that it has to find."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from campaigns.signals.bugs import BUGS

pytestmark = pytest.mark.campaign


def played(cases: int, out: Path, *more: str) -> dict[str, Any]:
    """What the campaign has found, in a process of its own, which forks: the one that tests has threads."""
    command = [sys.executable, "-m", "campaigns.signals", "--cases", str(cases), "--trainings", "counted", "own loop"]
    done = subprocess.run([*command, "--json", str(out), *more], capture_output=True, text=True, timeout=600)
    assert out.exists(), done.stderr[-3000:]
    found: dict[str, Any] = json.loads(out.read_text())
    assert done.returncode == 0, found
    assert (found["cases"], found["faults"]) == (cases, {})
    return found


def test_a_signal_at_any_line_ends_the_process_with_its_last_step_saved(tmp_path: Path) -> None:
    # A seed without a raising handler of one's own: where Tenuto lets go of a lock that may leave it locked.
    played(6, tmp_path / "signals.json", "--no-bugs", "--seed", "8")


@pytest.mark.long
def test_what_a_handler_must_not_do_is_found(tmp_path: Path) -> None:
    assert played(2, tmp_path / "signals.json")["bugs_caught"] == len(BUGS)
