"""The mutation run tells the truth: what is noticed counts, and what nobody notices or reaches is reported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RUN = Path(__file__).with_name("run.py")
SUMS = """
def double(a):
    return a + a


def half(a):
    return a / 2


def unseen(a):
    return a - 1


def countdown(n):
    while n > 0:
        n = n - 1
    return "over"
"""
TESTS = """
from tiny.sums import countdown, double, half


def test_double_is_looked_at():
    assert double(3) == 6


def test_half_is_only_called():
    half(3)


def test_the_countdown_ends():
    assert countdown(3) == "over"
"""


def mutation_run(result: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RUN), "--children", "2", "--json", str(result), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def small_tree(place: Path, tests: str = TESTS) -> list[str]:
    """A package with one module and its tests; the options that make the run mutate it."""
    for name, text in {
        "src/tiny/__init__.py": "",
        "src/tiny/sums.py": SUMS,
        "tests/test_sums.py": tests,
        "pyproject.toml": "[project]\nname = 'tiny'\n",
    }.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    return ["--tree", str(place), "--scope", "src/tiny", "--tests", "tests", "--sample", "0", "--patience", "2"]


def by_function(rows: list[dict[str, Any]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row in rows:
        found.setdefault(row["mutant"].split(".x_")[1].split("__mutmut")[0], set()).add(row["ended"])
    return found


@pytest.mark.long
def test_what_no_test_notices_or_reaches_is_reported_and_what_hangs_is_told_apart(tmp_path: Path) -> None:
    result, tree = tmp_path / "result.json", tmp_path / "tree"
    options = small_tree(tree)
    done = mutation_run(result, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())
    alive = by_function(found["survivors"])
    assert alive.keys() == {"half", "unseen", "countdown"}
    assert alive["half"] == {"survived"}
    assert alive["unseen"] == {"not reached"}
    assert {
        "mutant": "tiny.sums.x_half__mutmut_1",
        "change": ["-    return a / 2", "+    return a * 2"],
    }.items() <= next(row for row in found["survivors"] if row["mutant"] == "tiny.sums.x_half__mutmut_1").items()
    assert "tiny.sums.x_countdown__mutmut_4" in found["timed_out"], "n = n + 1 never ends"
    assert found["ended"]["failed"] >= 1, "a + a became a - a"
    assert found["run"] == found["mutants"] == sum(found["ended"].values())
    assert found["killed"] == found["run"] - len(found["survivors"])

    tests = tree / "tests" / "test_sums.py"
    tests.write_text(tests.read_text() + "\n\ndef test_half():\n    assert half(3) == 1.5\n")
    assert mutation_run(result, *options, "--again").returncode == 0
    again = json.loads(result.read_text())
    assert again["killed"] == found["killed"], "the first figure stays"
    assert by_function(again["again"]["survivors"]).keys() == {"unseen", "countdown"}
    assert again["again"]["killed"] == found["killed"] + len(again["again"]["killed_since"])

    (tree / "src" / "tiny" / "sums.py").write_text(SUMS + "\n\nmore = 1\n")
    assert "take a new sample" in mutation_run(result, *options, "--again").stderr


def test_tests_that_fail_by_themselves_kill_nothing(tmp_path: Path) -> None:
    options = small_tree(tmp_path / "tree", TESTS + "\n\ndef test_broken():\n    assert double(3) == 7\n")
    done = mutation_run(tmp_path / "result.json", *options)
    assert done.returncode != 0
    assert "tests that fail without any" in done.stderr
    assert not (tmp_path / "result.json").exists()


@pytest.mark.long
def test_tests_that_fail_only_beside_others_kill_nothing(tmp_path: Path) -> None:
    """They pass when it is seen what they reach, and fail when the mutants are run: none of those counts."""
    once = "\n\ndef test_once(tmp_path_factory):\n    import os, pathlib\n"
    once += "    mark = pathlib.Path(os.environ['TMPDIR'], 'mark')\n    assert not mark.exists()\n    mark.touch()\n"
    once += "    assert double(1) == 2\n"
    done = mutation_run(tmp_path / "result.json", *small_tree(tmp_path / "tree", TESTS + once))
    assert done.returncode != 0
    assert "the tests fail without a change" in done.stderr
    assert not (tmp_path / "result.json").exists()


@pytest.mark.long
def test_a_slice_of_the_run_from_end_to_end(tmp_path: Path) -> None:
    """Three changes of one module of the product, with that module's own tests."""
    scope = ["--scope", "src/tenuto/concurrency/deadlines.py", "--tests", "tests/unit/repo/test_deadlines.py"]
    done = mutation_run(tmp_path / "result.json", *scope, "--sample", "3", "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["mutants"] > found["run"] == found["sampled"] == 3
    assert found["killed"] == 3, found["survivors"]
