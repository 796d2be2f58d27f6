"""The public surface as type checkers see it: what they understand, and what they refuse."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tenuto

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def test_every_public_name_is_looked_at() -> None:
    text = (HERE / "public_surface.py").read_text()
    imported = re.findall(r"^from tenuto import (.*)$", text, re.M)[0].split(", ")
    assert {name for name in tenuto.__all__ if f"tenuto.{name}" not in text} <= set(imported)


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(tenuto.__file__).parent / "py.typed").exists()


@pytest.mark.long  # `make lint` looks too
def test_mypy_understands_what_is_right_and_refuses_what_is_wrong() -> None:
    names = [str(HERE / name) for name in ("public_surface.py", "wrong_use.py")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--warn-unused-ignores", "--no-warn-unreachable", *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long  # `make lint` looks too
def test_pyright_understands_what_is_right_and_refuses_what_is_wrong() -> None:
    # It would ask the network for its newest version: the one that is installed does.
    settled = os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(HERE)],
        capture_output=True,
        text=True,
        check=False,
        env=settled,
    )
    if not done.stdout.startswith("{"):
        pytest.skip(f"pyright cannot run here (its first run fetches it from npm): {done.stderr.strip()[-200:]}")
    found = json.loads(done.stdout)
    wrong = [
        f"{Path(one['file']).name}:{one['range']['start']['line'] + 1}: {one['message']}"
        for one in found["generalDiagnostics"]
        if one["severity"] == "error"
    ]
    assert (found["summary"]["filesAnalyzed"], wrong) == (2, [])
