"""The benchmark of codecs at its smallest: two steps of training, one round."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.long
def test_it_measures_every_codec_on_every_part_of_a_state(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "p12_codecs.py"), "--steps", "2", "--rounds", "1"]
    command += ["--where", str(tmp_path), "--no-save", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    codecs, bounds = found["codecs"], found["order_0_bound_share"]
    plain = {f"{part}" for part in codecs if "step" not in part}
    assert plain == {"weights bf16", "weights fp32", "moment m fp32", "moment v fp32"}
    assert set(codecs) == set(bounds) == plain | {f"{part}, 1 step on" for part in plain}
    for part, measured in codecs.items():
        item = 2 if "bf16" in part else 4
        own = ("delta", "xor") if "step" in part else ("planes",)
        assert {f"{difference}{item}-zstd" for difference in own} <= set(measured)
        for difference in own:
            share = measured[f"{difference}{item}-zstd"]["stored_share"]
            assert share <= 1.0
            assert share <= bounds[part][difference] + 0.08, f"{difference} on {part} is far from its bound"
        assert all(one[f"{way}_gb_s"] > 0 for one in measured.values() for way in ("encode", "decode"))
    assert found["whole_state_ratio"]["by itself"] > 1.1
    assert found["whole_state_ratio"]["in one save"] > found["whole_state_ratio"]["by itself"]
    assert (tmp_path / "2_1_2.pt").is_file()
