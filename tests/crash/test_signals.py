"""Signals at lines of a save's way: a short slice of `campaigns.signals`, and bugs that it has to find."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from campaigns.signals.bugs import BUGS

pytestmark = pytest.mark.campaign

CASES = 10


def test_a_signal_at_any_line_ends_the_process_with_its_last_step_saved(tmp_path: Path) -> None:
    """In a process of its own, which forks: the one that tests has threads."""
    out = tmp_path / "signals.json"
    command = [sys.executable, "-m", "campaigns.signals", "--cases", str(CASES), "--trainings", "counted", "own loop"]
    done = subprocess.run([*command, "--json", str(out)], capture_output=True, text=True, timeout=600, check=False)
    assert out.exists(), done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert done.returncode == 0, found
    assert (found["cases"], found["faults"]) == (CASES, {})
    assert found["bugs_caught"] == len(BUGS)
