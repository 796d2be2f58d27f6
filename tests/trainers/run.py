"""Runs the tests of each environment of trainers with its own Python: `make test-trainers`.

`python tests/trainers/run.py [NAME …] [-- pytest's arguments]`. An environment that this machine cannot have is named
and skipped; with TENUTO_TRAINERS_REQUIRED=1 that fails.
"""

from __future__ import annotations

import os
import subprocess
import sys

from install import ENVIRONMENTS, ROOT, TRAINERS


def run(name: str, arguments: list[str]) -> bool:
    """Returns whether the tests of one environment have passed, or nothing requires them."""
    missing = TRAINERS / f"{name}.missing"
    if missing.exists():
        print(f"{name}: not on this machine: {missing.read_text().strip().splitlines()[-1]}", flush=True)
        return not os.environ.get("TENUTO_TRAINERS_REQUIRED")
    paths = [str(ROOT / "src"), str(ROOT), str(ROOT / "tests")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    python = TRAINERS / name / "bin" / "python"
    command = [python, "-m", "pytest", "-n", "2", "--dist", "loadfile", f"tests/trainers/{name}", *arguments]
    print(f"{name}: {' '.join(map(str, command[1:]))}", flush=True)
    return subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode == 0


def main() -> int:
    """Runs all, also after one has failed."""
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    names = words[:cut] or list(ENVIRONMENTS)
    return 0 if all([run(name, words[cut + 1 :]) for name in names]) else 1


if __name__ == "__main__":
    sys.exit(main())
