"""Mutation run: changes the code in small ways, one at a time, and counts the changes that no test notices.

    python tests/mutation/run.py --sample 600 --seed 1 --json benchmarks/results/mutation.json

Mutates `repo`, `store/backends` and `image` in a copy of the tree (mutmut, extra `mutation`), takes a random sample of
the mutants (all with `--sample 0`), and runs for each the tests that reach the changed function. Survivors are listed
by name with the change; `survivors.json` beside this file gives the reason for those that no test can or need notice.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
REASONS = Path(__file__).with_name("survivors.json")
SCOPE = ("src/holdfast/repo", "src/holdfast/store/backends", "src/holdfast/image")
TESTS = (
    "tests/unit/repo",
    "tests/unit/store",
    "tests/unit/image",
    "tests/unit/engine",
    "tests/unit/upkeep",
    "tests/conformance",
    "tests/golden",
)
CONFIG = """
[tool.mutmut]
source_paths = {scope}
also_copy = ["src", "tests", "pyproject.toml"]
pytest_add_cli_args_test_selection = {tests}
pytest_add_cli_args = ["-p", "no:cacheprovider", "-p", "no:xdist", "--timeout", "60"]
"""


def prepared(place: Path) -> None:
    """A copy of the tree with mutmut's settings."""
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    text = (ROOT / "pyproject.toml").read_text()
    (place / "pyproject.toml").write_text(text + CONFIG.format(scope=json.dumps(SCOPE), tests=json.dumps(TESTS)))
    shutil.copy(ROOT / "README.md", place / "README.md")


def mutmut(place: Path, names: list[str], children: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(place / "mutants" / "src")}
    command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(children), *names]
    with (place / "mutmut.log").open("ab") as log:
        subprocess.run(command, cwd=place, env=environment, stdout=log, stderr=log, check=False)


def outcomes(place: Path) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for meta in sorted((place / "mutants").rglob("*.meta")):
        found.update(json.loads(meta.read_text())["exit_code_by_key"])
    return found


def difference(place: Path, name: str) -> list[str]:
    shown = subprocess.run(
        [sys.executable, "-m", "mutmut", "show", name], cwd=place, capture_output=True, text=True, check=False
    ).stdout
    lines = shown.splitlines()
    return [line for line in lines if line[:1] in "+-" and not line.startswith(("+++", "---"))]


def summary(place: Path, chosen: list[str], total: int) -> dict[str, Any]:
    codes = outcomes(place)
    run = {name: codes[name] for name in chosen if codes.get(name) is not None}
    # 0: every test passed. 33: no test reaches the function. Anything else: a test failed, crashed or did not end.
    survived = sorted(name for name, code in run.items() if code in (0, 33, 5))
    reasons = json.loads(REASONS.read_text()) if REASONS.exists() else {}
    return {
        "mutants": total,
        "sampled": len(chosen),
        "run": len(run),
        "killed": len(run) - len(survived),
        "killed_share": round((len(run) - len(survived)) / max(len(run), 1), 4),
        "survivors": [
            {"mutant": name, "change": difference(place, name), "reason": reasons.get(name, "")} for name in survived
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=600, help="how many mutants; 0: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--children", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, required=True, help="where the result goes")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="holdfast-mutation-") as directory:
        place = Path(directory)
        prepared(place)
        mutmut(place, ["holdfast.no_such_mutant"], options.children)  # writes the mutants, and which test reaches what
        every = sorted(outcomes(place))
        if not every:
            sys.exit(f"no mutants were made:\n{(place / 'mutmut.log').read_text()[-3000:]}")
        size = min(options.sample or len(every), len(every))
        chosen = sorted(random.Random(options.seed).sample(every, size))
        mutmut(place, chosen, options.children)
        result = {
            "id": "mutation",
            "command": f"python tests/mutation/run.py --sample {options.sample} --seed {options.seed}",
            "scope": SCOPE,
            "tests": TESTS,
            "seconds": round(time.monotonic() - began),
            "versions": {"python": sys.version.split()[0], "mutmut": version("mutmut")},
            **summary(place, chosen, len(every)),
        }
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"{result['killed']} of {result['run']} mutants killed ({result['killed_share']:.1%}), of {len(every)} in all"
    )


if __name__ == "__main__":
    main()
