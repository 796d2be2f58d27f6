"""Trainings with DeepSpeed's ZeRO on real ranks: killed and resumed, on another number of ranks, its own files read."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest

pytest.importorskip("deepspeed")

import tenuto
from tenuto.errors import CorruptionError, Unserialisable

EXTENSIONS = str(Path(sys.prefix) / "extensions")
"""Where DeepSpeed's operator is compiled, once: by default a cache that each session of tests has anew."""
SCRIPT = Path(__file__).with_name("scripts") / "deepspeed_loop.py"
STEPS = 5
CASES = [(1, "fp32", 3), (2, "bf16", 1), (3, "bf16", 2)]
"""Stage, precision, and the stage under which one rank goes on."""


def train(ranks: int, where: Path, stage: int, precision: str, out: Path, **environ: str) -> list[str]:
    """Trains on this many processes and returns what they have said. `KILL` says that they die."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    common = {**os.environ, **environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    arguments = [sys.executable, "-W", "ignore", str(SCRIPT), str(where), str(STEPS), str(stage), precision, str(out)]
    for lock in Path(EXTENSIONS).glob("*/lock"):  # of a build that was killed: everybody would wait for it
        lock.unlink()
    logs = [out.with_name(f"{out.name}.{rank}.log") for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu"}
        own["TORCH_EXTENSIONS_DIR"] = EXTENSIONS
        with log.open("w") as file:
            processes.append(subprocess.Popen(arguments, env=own, stdout=file, stderr=subprocess.STDOUT))
    deadline = monotonic() + 600
    while any(process.poll() is None for process in processes) and monotonic() < deadline:
        if any(process.poll() for process in processes):
            break  # as launchers do: where one has died, the others wait for it
        with contextlib.suppress(subprocess.TimeoutExpired):
            processes[0].wait(0.2)
    for process in processes:
        process.kill()
        process.wait()
    said = [log.read_text() for log in logs]
    died = any(process.returncode for process in processes)
    assert died == ("KILL" in environ), "\n".join(said)[-6000:]
    return said


def found(out: Path, rank: int, kind: str = "") -> dict[str, Any]:
    return json.loads(Path(f"{out}.{rank}{kind}").read_text())


def arrays(values: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(value, np.float64) for name, value in values.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns what trains a case to its end, once: the directory with `whole` (its repository), `out` and `own`."""
    made: dict[int, Path] = {}

    def of(stage: int, precision: str) -> Path:
        if stage not in made:
            made[stage] = tmp_path_factory.mktemp(f"stage{stage}")
            scaler = {"SCALER": "1"} if stage == 1 else {}
            own = str(made[stage] / "own")
            train(2, made[stage] / "whole", stage, precision, made[stage] / "out", OWN=own, **scaler)
        return made[stage]

    return of


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("stage", "precision", "other"), CASES)
def test_killed_on_two_ranks_it_ends_with_the_same_bits(
    stage: int, precision: str, other: int, trained: Any, tmp_path: Path
) -> None:
    scaler = {"SCALER": "1"} if stage == 1 else {}
    train(2, tmp_path / "run", stage, precision, tmp_path / "out", KILL="3", **scaler)
    said = train(2, tmp_path / "run", stage, precision, tmp_path / "out", **scaler)
    assert "resumed run main at step" in said[0]
    for rank in range(2):
        uninterrupted = found(trained(stage, precision) / "out", rank)
        resumed = found(tmp_path / "out", rank)
        assert uninterrupted.keys() == resumed.keys()
        for what, value in uninterrupted.items():
            assert resumed[what] == value, f"{what} of rank {rank}"
        if scaler:
            assert uninterrupted["scaler"]["cur_scale"] > 2.0  # it has a history, which was restored


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("stage", "precision", "other"), CASES)
def test_one_rank_goes_on_where_two_were_also_under_another_stage(
    stage: int, precision: str, other: int, trained: Any, tmp_path: Path
) -> None:
    before = trained(stage, precision)
    train(1, before / "whole", other, precision, tmp_path / "out")
    assert found(tmp_path / "out", 0, ".whole") == found(before / "out", 0, ".whole")
    assert found(tmp_path / "out", 0)["counters"] == found(before / "out", 0)["counters"]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("stage", "precision", "other"), CASES)
def test_its_own_checkpoint_is_read_whole(stage: int, precision: str, other: int, trained: Any, tmp_path: Path) -> None:
    before = trained(stage, precision)
    own = before / "own" / f"global_step{STEPS}"
    expected = found(before / "out", 0, ".whole")
    with tenuto.formats.read(own) as reader:
        assert (reader.format, reader.step) == ("deepspeed", STEPS)
        _same(reader.tree, expected)
        counters = found(before / "out", 0)["counters"]
        assert reader.tree["engine"]["counters"]["global_samples"] == counters[1]
    (done,) = tenuto.Repository.migrate(own, tmp_path / "taken").imported
    assert done.id.step == STEPS
    with tenuto.open(tmp_path / "taken") as opened, tenuto.open(before / "whole") as saved:
        for name in expected["weights"]:
            assert (opened[f"model/{name}"].numpy() == saved[f"model/{name}"].numpy()).all()
            assert (
                opened[f"optimizer/exp_avg_sq/{name}"].numpy() == saved[f"optimizer/exp_avg_sq/{name}"].numpy()
            ).all()


def _same(tree: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, values in arrays(expected["weights"]).items():
        assert (tree["model"][name].read().reshape(-1) == values).all(), name
    for name, values in arrays(expected["exp_avg"]).items():
        assert (tree["optimizer"]["exp_avg"][name].read().reshape(-1) == values).all(), name
    assert (tree["model"]["frozen"].read().astype(np.float32) == 1).all() and "seen" in tree["model"]
    assert (tree["model"]["third.weight"].read() == tree["model"]["first.weight"].read()).all()  # tied


@pytest.mark.timeout(1500)
def test_a_universal_checkpoint_is_read(trained: Any, tmp_path: Path) -> None:
    before = trained(2, "bf16")
    own, out = before / "own" / f"global_step{STEPS}", tmp_path / "universal"
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    subprocess.run(
        [*command, "--input_folder", str(own), "--output_folder", str(out)],
        check=True,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": EXTENSIONS},
    )
    with tenuto.formats.read(out) as reader:
        assert reader.step == STEPS
        _same(reader.tree, found(before / "out", 0, ".whole"))


@pytest.mark.timeout(1500)
def test_a_lost_or_cut_file_is_refused(trained: Any, tmp_path: Path) -> None:
    own = trained(1, "fp32") / "own" / f"global_step{STEPS}"
    for file in own.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    last = tmp_path / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = last.read_bytes()
    last.unlink()
    with pytest.raises(CorruptionError, match="saved by 2 ranks, and has the partitions of 1"):
        tenuto.formats.read(tmp_path)
    last.write_bytes(data[: len(data) // 2])
    with pytest.raises(CorruptionError, match=last.name):
        tenuto.formats.read(tmp_path)
    last.rename(tmp_path / "zero_pp_rank_0_mp_rank_01_optim_states.pt")
    with pytest.raises(Unserialisable, match="tensor or pipeline parallelism"):
        tenuto.formats.read(tmp_path)


@pytest.mark.timeout(1500)
def test_a_script_with_save_checkpoint_stays_as_it_is(tmp_path: Path) -> None:
    script = Path(__file__).with_name("scripts") / "deepspeed_attached.py"

    def run(where: str, steps: int, *tag: str) -> dict[str, Any]:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = str(one.getsockname()[1])
        own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
        environ = {**os.environ, **own, "TORCH_EXTENSIONS_DIR": EXTENSIONS}
        out = tmp_path / "out.json"
        words = [sys.executable, "-W", "ignore", str(script), str(tmp_path / where), str(steps), str(out), *tag]
        ended = subprocess.run(
            words, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
        )
        assert ended.returncode == 0, ended.stderr[-4000:]
        return json.loads(out.read_text())

    whole = run("whole", 5)
    assert whole["path"] is None and whole["seen"] == [1, 2, 3, 4, 5]
    run("run", 3)
    resumed = run("run", 5)
    assert resumed == {**whole, "path": "global_step3"}, "its weights too, through dropout"
    assert run("run", 4, "best")["path"] == "global_step2"
    assert run("whole", 5, "global_step4") == {**whole, "path": "global_step4"}
