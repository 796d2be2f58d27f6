"""A process that loads once imports what loading needs, and nothing of saving, training, ranks or the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MOST_MODULES = 120
LOAD = """
import sys
import numpy
before = set(sys.modules)
import tenuto
restored = tenuto.load(sys.argv[1])
assert restored.state["w"].tolist() == [1.0, 2.0], restored.state
into = {"w": numpy.zeros(2), "step": 0}
assert tenuto.load(sys.argv[1], into).step == 3 and into["w"].tolist() == [1.0, 2.0]
print(*sorted(name for name in sys.modules if name.partition(".")[0] in ("tenuto", "torch")))
"""
SAVE = "import sys, numpy, tenuto; tenuto.save({'w': numpy.array([1.0, 2.0]), 'step': 7}, sys.argv[1], step=3)"
NOT_NEEDED = (
    "tenuto.certify",
    "tenuto.cli",
    "tenuto.engine.fence",
    "tenuto.engine.group",
    "tenuto.engine.memory_tier",
    "tenuto.engine.save",
    "tenuto.engine.staging",
    "tenuto.integrations",
    "tenuto.maintenance",
    "tenuto.policy",
    "tenuto.repo.ownership",
    "tenuto.telemetry.log",
    "tenuto.telemetry.jsonlines",
    "tenuto.telemetry.progress",
    "tenuto.training",
    "torch",
)
DETECTION = {
    "tenuto.ranks",
    "tenuto.ranks.contract",
    "tenuto.ranks.detection",
    "tenuto.ranks.kv",
    "tenuto.ranks.kv.in_process",
    "tenuto.ranks.kv.torch_store",
}
"""What finding out that a process is alone takes."""


def run(program: str, where: Path) -> str:
    done = subprocess.run([sys.executable, "-c", program, str(where)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_single_load_imports_few_modules(tmp_path: Path) -> None:
    run(SAVE, tmp_path)
    names = run(LOAD, tmp_path).split()
    ours = [name for name in names if name.startswith("tenuto.")]
    assert len(ours) <= MOST_MODULES, ours
    assert [name for name in names if any(f"{name}.".startswith(f"{room}.") for room in NOT_NEEDED)] == []
    assert {name for name in ours if name.startswith("tenuto.ranks")} <= DETECTION


def test_a_single_save_by_one_process_imports_nothing_of_many(tmp_path: Path) -> None:
    names = run(f"{SAVE}; print(*sys.modules)", tmp_path).split()
    assert [name for name in names if name.startswith(("tenuto.engine.group", "tenuto.certify", "tenuto.cli"))] == []


def test_a_training_imports_nothing_of_certify(tmp_path: Path) -> None:
    program = "import sys, tenuto; tenuto.Checkpointer(sys.argv[1], {'n': 1}).close(); print(*sys.modules)"
    assert [name for name in run(program, tmp_path).split() if name.startswith(("tenuto.certify", "tenuto.cli"))] == []
