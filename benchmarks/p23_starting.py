"""P23: what importing costs before the first save: processes that import, and end.

    python benchmarks/p23_starting.py

Each is beside `import numpy`, which every user of Tenuto has imported anyway. The small load reads a state of a few
numbers. Target: 0.15 s beside numpy for an import and a small load.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from harness import Contender, Result, arguments, compare, median_interval, note, report, timed, workplace

import tenuto

NUMPY, LOAD = "import numpy", "tenuto.load of a small state"
PROGRAMS = {
    NUMPY: "import numpy",
    "tenuto.Checkpointer": "import numpy, tenuto; tenuto.Checkpointer",
    LOAD: "import numpy, sys, tenuto; tenuto.load(sys.argv[1])",
    "torch.load of a small state": "import numpy, sys, torch; torch.load(sys.argv[1] + '.pt')",
    "tenuto --version": "import sys; sys.argv = ['tenuto', '--version']; from tenuto.cli.application import run; run()",
}


def main() -> None:
    options = arguments(__doc__ or "")
    with workplace(options) as place:
        where = place / "small"
        import torch

        tenuto.save({"w": np.arange(4.0)}, where)
        torch.save({"w": torch.arange(4.0)}, f"{where}.pt")

        def started(name: str, program: str) -> Contender:
            command = [sys.executable, "-c", program, str(where)]
            return Contender(name, lambda: timed(lambda: subprocess.run(command, check=True, capture_output=True)))

        contenders = [started(*one) for one in PROGRAMS.items()]
        seconds = compare(contenders, rounds=options.rounds, own=LOAD, note=note)
        result = Result("p23_starting", seconds, 32)
        result.facts["modules"] = _modules(where)
        beside_ms = [1e3 * (own - plain) for own, plain in zip(seconds[LOAD], seconds[NUMPY], strict=True)]
        result.judge_value(
            "an import and a small load beside numpy <= 150 ms", median_interval(beside_ms), at_most=150.0, unit="ms"
        )
        report(result, options, place)


def _modules(where: Path) -> int:
    """How many modules of ours a small load has loaded."""
    count = "print(sum(name.split('.')[0] == 'tenuto' for name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", f"{PROGRAMS[LOAD]}; {count}", str(where)], check=True, capture_output=True, text=True
    )
    return int(done.stdout)


if __name__ == "__main__":
    main()
