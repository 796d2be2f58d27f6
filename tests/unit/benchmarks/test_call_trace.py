"""A save passes through few objects, and few calls, before its first byte is copied."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "call_trace.py"
MOST_CALLS = 350


def test_few_objects_lie_between_a_completed_step_and_the_first_byte(tmp_path: Path) -> None:
    result = tmp_path / "trace.json"
    subprocess.run([sys.executable, SCRIPT, "--json", result], check=True, capture_output=True)
    found = json.loads(result.read_text())
    assert found["objects on the stack at the first byte"] == ["Checkpointer", "TrainingSession", "RunSaver", "Saver"]
    assert found["step_done to the first byte, training thread"]["calls"] <= MOST_CALLS
