"""The benchmark of what many checkpoints take, at its smallest: three saves of one training."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.long
def test_it_says_for_each_encoding_what_is_stored_and_what_saves_and_restores_cost(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "p13_space.py"), "--checkpoints", "3", "--gaps", "1"]
    command += ["--kinds", "adapters", "--where", str(tmp_path), "--no-save", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)["trainings"]
    assert set(found) == {"adapters, gap 1"}
    for facts in found.values():
        assert 0 < facts["changed"] < facts["state"]
        for name in ("plain", "dedupe", "small", "auto"):
            assert set(facts[name]["restore_s"]) == {"first", "middle", "last"}
        assert facts["plain"]["packs"] >= facts["state"]
        assert facts["dedupe"]["packs"] <= 1.02 * facts["changed"] + 0.05 * facts["state"]
        assert facts["small"]["stored"] < facts["dedupe"]["stored"] < facts["plain"]["stored"]
    assert not list(tmp_path.iterdir())
