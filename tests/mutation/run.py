"""Mutation run: changes the code in small ways, one at a time, and counts the changes that no test notices.

    python tests/mutation/run.py --sample 600 --seed 1 --json benchmarks/results/mutation.json
    python tests/mutation/run.py --again --json benchmarks/results/mutation.json

Mutates `repo`, `store/backends` and `image` in a copy of the tree (mutmut), takes a random sample of the mutants (all
with `--sample 0`), and runs for each the tests that reach the changed function. Survivors are listed by name with the
change, those that no test reaches among them; `survivors.json` beside this file gives the reason for those that no test
can or need notice. `--again` runs the survivors of an earlier result with the tests that there are now, and says beside
the first figure how many are killed since.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
REASONS = HERE / "survivors.json"
SCOPE = ("src/tenuto/repo", "src/tenuto/store/local", "src/tenuto/engine/staging")
TESTS = (
    "tests/unit/repo",
    "tests/unit/store",
    "tests/unit/engine/staging",
    "tests/unit/engine",
    "tests/conformance",
    "tests/golden",
)
CONFIG = """
[tool.mutmut]
source_paths = {scope}
also_copy = ["src", "tests", "pyproject.toml"]
pytest_add_cli_args_test_selection = {tests}
pytest_add_cli_args = {options}
"""
ELSEWHERE = "tests/unit/store/test_objects_failures.py::test_no_secret_shows"
"""Starts commands in a directory of its own, where mutants do not find their settings."""
PYTEST_OPTIONS = ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "mutated_session", f"--deselect={ELSEWHERE}"]
KILLED = ("failed", "timed out", "crashed")
"""How a mutant ends that was noticed. Anything else that is not known counts as no kill."""


class Work(NamedTuple):
    """What is mutated, where, and which tests are to notice."""

    tree: Path
    place: Path
    scope: Sequence[str]
    tests: Sequence[str]
    children: int
    patience_s: float


def prepare(work: Work) -> None:
    """A copy of the tree with mutmut's settings, the mutants in it, and which test reaches what."""
    for name in ("src", "tests"):
        shutil.copytree(work.tree / name, work.place / name, ignore=shutil.ignore_patterns("__pycache__"))
    settings = CONFIG.format(
        scope=json.dumps(work.scope), tests=json.dumps(work.tests), options=json.dumps(PYTEST_OPTIONS)
    )
    (work.place / "pyproject.toml").write_text((work.tree / "pyproject.toml").read_text() + settings)
    (work.place / "tmp").mkdir()
    # Python remembers a place on its path that is not there: the tests would then import what is installed.
    (work.place / "mutants" / "src").mkdir(parents=True)
    # No mutant has this name: mutmut writes the mutants, runs the tests to see what each reaches, and stops.
    command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(work.children), "tenuto.none"]
    with (work.place / "log").open("wb") as log:
        subprocess.run(command, cwd=work.place, env=environment(work), stdout=log, stderr=log, check=False)
    if not (work.place / "mutants" / "mutmut-stats.json").exists():
        sys.exit(f"no mutants, or tests that fail without any:\n{last_of(work.place / 'log')}")


def environment(work: Work) -> dict[str, str]:
    paths = [str(work.place / "mutants" / "src"), str(HERE), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "TMPDIR": str(work.place / "tmp")}


def last_of(log: Path) -> str:
    return log.read_text(errors="replace")[-12000:]


def every_mutant(work: Work) -> list[str]:
    found: list[str] = []
    for meta in (work.place / "mutants").rglob("*.meta"):
        found += json.loads(meta.read_text())["exit_code_by_key"]
    return sorted(found)


def is_killed(ended: str) -> bool:
    return ended in KILLED


def run_all(work: Work, chosen: Sequence[str]) -> dict[str, str]:
    """How each of these mutants ended; for each the tests run that reach the function, the quickest first."""
    statistics = json.loads((work.place / "mutants" / "mutmut-stats.json").read_text())
    seconds = statistics["duration_by_test"]
    reaching = statistics["tests_by_mangled_function_name"]
    tests = {
        name: sorted(reaching.get(name.rpartition("__mutmut_")[0], []), key=lambda test: (seconds[test], test))
        for name in chosen
    }
    out, todo = work.place / "ended.jsonl", work.place / "todo.json"
    # What takes so much longer than without a change hangs, on however busy a machine.
    patience = {test: max(work.patience_s, 20 * took) for test, took in seconds.items()}
    todo.write_text(json.dumps({"mutants": tests, "patience": patience, "children": work.children, "out": str(out)}))
    out.touch()
    command = [sys.executable, "-m", "pytest", "--rootdir=.", "-q", *PYTEST_OPTIONS, *work.tests]
    with (work.place / "log").open("wb") as log:
        subprocess.run(
            command,
            cwd=work.place / "mutants",
            env=environment(work) | {"MUTATION_WORK": str(todo), "MUTANT_UNDER_TEST": ""},
            stdin=subprocess.DEVNULL,
            stdout=log,
            check=False,
        )
    ended = {row["mutant"]: row["ended"] for row in map(json.loads, out.read_text().splitlines())}
    if ended.pop("", "not run") != "survived":
        sys.exit(f"the tests fail without a change:\n{last_of(work.place / 'log')}")
    missing = [name for name in chosen if name not in ended]
    if missing:
        sys.exit(f"{len(missing)} of {len(chosen)} mutants were not run:\n{last_of(work.place / 'log')}")
    return ended


@cache
def functions_in(path: Path) -> dict[str, list[str]]:
    """The lines of every function in a mutated module, mutants among them, by name."""
    text = path.read_text()
    lines = text.splitlines()
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return {node.name: lines[node.lineno - 1 : node.end_lineno] for node in found}


def change_of(work: Work, name: str) -> list[str]:
    """The lines that a mutant takes away ("-") and puts ("+")."""
    module, _, mutant = name.rpartition(".")
    path = work.place / "mutants" / "src" / (module.replace(".", "/") + ".py")
    functions = functions_in(path if path.exists() else path.with_suffix("") / "__init__.py")
    original = mutant.partition("__mutmut_")[0] + "__mutmut_orig"
    changed = [line.replace(mutant, original, 1) for line in functions[mutant]]
    rows = difflib.unified_diff(functions[original], changed, lineterm="", n=0)
    return [row for row in rows if row[:1] in "+-" and not row.startswith(("+++", "---"))]


def reason_for(name: str, change: list[str], path: Path = REASONS) -> str:
    """The reason that is on record for this change of this function, whatever its number is today."""
    function = name.rpartition("__mutmut_")[0]
    for group in json.loads(path.read_text()) if path.exists() else []:
        for other in group["mutants"]:
            if other["mutant"].rpartition("__mutmut_")[0] == function and other["change"] == change:
                return f"{group['kind']}: {group['reason']}"
    return ""


def survivors(work: Work, ended: dict[str, str]) -> list[dict[str, Any]]:
    rows = []
    for name in sorted(name for name, how in ended.items() if not is_killed(how)):
        change = change_of(work, name)
        rows.append({"mutant": name, "ended": ended[name], "change": change, "reason": reason_for(name, change)})
    return rows


def counts(ended: dict[str, str]) -> dict[str, Any]:
    killed = sum(map(is_killed, ended.values()))
    share = round(killed / max(len(ended), 1), 4)
    return {"run": len(ended), "killed": killed, "killed_share": share, "ended": dict(Counter(ended.values()))}


def code_digest(work: Work) -> str:
    """Of everything that is mutated: names of mutants mean the same only while this is the same."""
    found = hashlib.sha256()
    for scope in sorted(work.scope):
        place = work.tree / scope
        for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


def sampled(work: Work, options: argparse.Namespace) -> dict[str, Any]:
    every = every_mutant(work)
    size = min(options.sample or len(every), len(every))
    ended = run_all(work, random.Random(options.seed).sample(every, size))
    return {
        "command": f"python tests/mutation/run.py --sample {options.sample} --seed {options.seed}",
        "seed": options.seed,
        "scope": list(work.scope),
        "tests": list(work.tests),
        "code": code_digest(work),
        "machine": platform.platform(),
        "versions": {name: version(name) for name in ("mutmut", "pytest")} | {"python": sys.version.split()[0]},
        "mutants": len(every),
        "sampled": size,
        **counts(ended),
        "timed_out": sorted(name for name, how in ended.items() if how == "timed out"),
        "survivors": survivors(work, ended),
    }


def again(work: Work, earlier: dict[str, Any]) -> dict[str, Any]:
    """The earlier result, and what today's tests make of its survivors."""
    ended = run_all(work, [row["mutant"] for row in earlier["survivors"]])
    since = sorted(name for name, how in ended.items() if is_killed(how))
    killed = earlier["killed"] + len(since)
    return earlier | {
        "again": {
            "command": "python tests/mutation/run.py --again",
            "killed": killed,
            "killed_share": round(killed / max(earlier["run"], 1), 4),
            "killed_since": since,
            "timed_out_since": sorted(name for name in since if ended[name] == "timed out"),
            "survivors": survivors(work, ended),
        }
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=600, help="how many mutants; 0: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="run the survivors of the result that is there")
    parser.add_argument("--patience", type=float, default=40, help="seconds that every test may take")
    parser.add_argument("--children", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tree", type=Path, default=ROOT, help="the tree with src, tests and pyproject.toml")
    parser.add_argument("--scope", nargs="+", default=SCOPE, help="what is mutated")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="the tests that are to notice")
    parser.add_argument("--json", type=Path, required=True, help="where the result goes, or is")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tenuto-mutation-") as directory:
        place = Path(directory)
        work = Work(options.tree, place, options.scope, options.tests, options.children, options.patience)
        earlier = json.loads(options.json.read_text()) if options.again else None
        if earlier is not None and earlier["code"] != code_digest(work):
            sys.exit("the code has changed since, and its mutants with it: take a new sample")
        prepare(work)
        if earlier is not None:
            result = again(work, earlier)
            figures = result["again"]
        else:
            figures = result = {"id": "mutation", **sampled(work, options)}
        figures["seconds"] = round(time.monotonic() - began)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{figures['killed']} of {result['run']} mutants killed ({figures['killed_share']:.1%})")


if __name__ == "__main__":
    main()
