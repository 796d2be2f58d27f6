"""R8: N + M steps equal N steps, a new process, M steps, in every bit of the state."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("exact_resume.py")
_spec = importlib.util.spec_from_file_location("exact_resume", PROGRAM)
assert _spec is not None and _spec.loader is not None
exact_resume = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = exact_resume
_spec.loader.exec_module(exact_resume)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    done = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("case", exact_resume.CASES)
def test_r8_a_resumed_run_ends_in_the_state_of_an_uninterrupted_one(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == "equal"


def test_r8_the_comparison_tells_training_that_does_not_resume_exactly(outcomes: dict[str, str]) -> None:
    for case in exact_resume.CONTROL:
        assert outcomes[case].startswith("model/0.weight: byte ")
