"""`tenuto certify` of jobs of several ranks: every rank is followed, killed, resumed and compared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.thinning import thinned

SCRIPT = Path(__file__).with_name("certify_scripts") / "ranks.py"
EXAMPLES = Path(__file__).parents[2] / "examples"


def certify(place: Path, *command: str, status: int) -> dict[str, Any]:
    where = place / "checkpoints"
    program = [
        sys.executable,
        "-c",
        "import tenuto.cli as cli; cli.main()",
        "certify",
        str(where),
        "--steps",
        "3",
        "--more",
        "5",
        "--json",
    ]
    done = subprocess.run(
        [*program, "--patience", "250", "--", *command], capture_output=True, text=True, timeout=290, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert not (where / "runs").exists(), "only what is proven is recorded there"
    assert not [one for one in psutil.process_iter(["cmdline"]) if str(place) in " ".join(one.info["cmdline"] or ())]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def script(place: Path, fault: str) -> list[str]:
    return [sys.executable, str(SCRIPT), str(place / "checkpoints"), str(place / "meet"), fault]


def test_ranks_that_resume_exactly_are_certified(tmp_path: Path) -> None:
    found = certify(tmp_path, *script(tmp_path, "none"), status=0)
    assert (found["verdict"], found["ranks"], found["saved"], found["last"]) == ("exact", 2, 3, 8)
    assert [life["killed"] for life in found["processes"]] == [False, True, False]
    assert found["processes"][2]["began"] == 3


@pytest.mark.parametrize(
    ("fault", "status", "verdict", "step"),
    thinned([("forgets", 20, "inexact", 4), ("clock", 21, "unrepeatable", 4)], 2),
)
def test_what_differs_on_one_rank_is_named_with_step_leaf_and_rank(
    tmp_path: Path, fault: str, status: int, verdict: str, step: int
) -> None:
    found = certify(tmp_path, *script(tmp_path, fault), status=status)
    assert (found["verdict"], found["difference"]["rank"]) == (verdict, 1)
    assert (found["difference"]["step"], found["difference"]["first"]) == (step, "rows")


@pytest.mark.long
def test_a_job_of_torchrun_is_certified(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [str(EXAMPLES / "ranks_fsdp2.py"), "--where", str(tmp_path / "checkpoints"), "--steps", "20"]
    found = certify(tmp_path, *torchrun, *program, status=0)
    assert (found["verdict"], found["ranks"], found["saved"], found["last"]) == ("exact", 2, 3, 8)
    assert found["processes"][2]["began"] == 3
