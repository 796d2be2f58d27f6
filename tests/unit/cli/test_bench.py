import json
import os
import signal

import numpy as np
import pytest

import tenuto
from tenuto.bench import raw
from tenuto.cli.commands import bench
from tenuto.errors import UsageError

SMALL = ("--size", "1MiB", "--leaves", "5", "--rounds", "1")


def test_bench_measures_and_leaves_nothing(cli, tmp_path):
    (tmp_path / "mine").write_text("stays")
    status, out, err = cli("bench", tmp_path, *SMALL)
    assert status == 0, err
    assert out.splitlines()[0].startswith(f"{tmp_path}  (")
    assert out.splitlines()[1].startswith("1.00 MiB in 5 leaves, torch ")
    for words in ("copy in memory", "write, buffered, flushed", "save: training blocked", "restore, cold"):
        assert f"\n  {words}  " in out
    assert "\nwhat to expect\n" in out
    assert max(len(row) for row in out.splitlines()[1:] if str(tmp_path) not in row) <= 80
    assert "unhealthy" not in out
    assert err.splitlines()[0] == "making a state"
    assert "saving with Tenuto, round 1 of 1" in err.splitlines()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_bench_like_a_checkpoint_as_json(cli, tmp_path):
    state = {"a": np.arange(1000, dtype=np.float32), "b": np.arange(7, dtype=np.uint8), "empty": np.zeros((0, 3))}
    tenuto.save(state, tmp_path / "like")
    (tmp_path / "place").mkdir()
    status, out, err = cli("bench", tmp_path / "place", "--like", tmp_path / "like", "--rounds", "1", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert (found["schema"], found["leaves"], found["bytes"]) == ("tenuto.bench/1", 2, 4007)
    assert {"save_stall", "restore_cold", "restore_hot", "save_durable"} <= found["median_s"].keys()
    assert all(len(rounds) == 1 for what, rounds in found["rounds_s"].items() if what != "flush")
    assert set(found["save_every_s"]) == {"0.05", "0.01", "0.001"}
    assert list((tmp_path / "place").iterdir()) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_bench_cleans_up_when_it_is_ended(cli, tmp_path, monkeypatch, number, status):
    seen = []

    def ended(*arguments, **more):
        seen.extend(path.name for path in tmp_path.iterdir())
        os.kill(os.getpid(), number)

    monkeypatch.setattr(raw, "fastest_piece", ended)
    monkeypatch.setattr(signal, "default_int_handler", signal.default_int_handler)
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)]
    assert cli("bench", tmp_path, *SMALL)[0] == status
    assert len(seen) == 1
    assert seen[0].startswith(".tenuto-bench-")
    assert list(tmp_path.iterdir()) == []
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)] == before


def test_bench_tells_when_what_comes_back_is_not_what_was_saved(cli, tmp_path, monkeypatch):
    from tenuto.bench.measure import Sample

    counts = iter(range(100))
    monkeypatch.setattr(Sample, "fingerprint", lambda self: [next(counts)])
    status, _, err = cli("bench", tmp_path, *SMALL)
    assert status == 12
    assert "is not what was saved" in err
    assert list(tmp_path.iterdir()) == []


def test_bench_refuses_what_makes_no_sense(cli, tmp_path):
    assert cli("bench", tmp_path, "--size", "lots")[0] == 2
    assert cli("bench", tmp_path, "--size", "4000TiB")[0] == 19
    assert cli("bench", tmp_path / "absent")[0] == 2
    assert cli("bench", tmp_path, "--like", tmp_path, "--size", "1MiB")[0] == 2
    assert cli("bench", tmp_path, "--like", tmp_path)[0] == 10
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4GiB", 4 << 30), ("4g", 4 << 30), ("500 MB", 500_000_000), ("1.5K", 1536), ("4096", 4096), ("7B", 7)],
)
def test_sizes(text, nbytes):
    assert bench.parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "0.0GiB", "1 XiB", "1e9", "١"])
def test_what_is_no_size(text):
    with pytest.raises(UsageError, match="is not a size"):
        bench.parse_size(text)
