"""The files for Slurm, Kubernetes and systemd: they parse, and have what a training needs to save before it is killed.

Their own checkers are not packages of an index; so the fields are looked at here, as their documentation names them.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tenuto.model.sizes import parse_time
from tenuto.supervisor.journal import Journal

EXAMPLES = Path(__file__).parents[2] / "examples"
SBATCH = {
    "job-name": r"\w+", "nodes": r"\d+", "ntasks-per-node": "1", "gpus-per-node": r"\d+", "cpus-per-task": r"\d+",
    "time": r"\d+:\d\d:\d\d", "requeue": "", "signal": r"TERM@\d+", "open-mode": "append", "output": r"[\w%.-]+",
}  # fmt: skip


def grace(words: list[str]) -> float:
    return parse_time(words[words.index("--grace") + 1])


def test_the_batch_script_parses_and_leaves_time_to_save() -> None:
    path = EXAMPLES / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(path)], check=True)
    lines = path.read_text().splitlines()
    given = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines if line.startswith("#SBATCH"))
    assert given.keys() == SBATCH.keys()
    for name, value in given.items():
        assert re.fullmatch(SBATCH[name], value), name
    # sbatch stops to read options at the first command.
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(number < first for number, line in enumerate(lines) if line.startswith("#SBATCH"))
    words = shlex.split("\n".join(lines), comments=True)
    inner = shlex.split(next(word for word in words if "tenuto run" in word))
    hours, minutes, _ = map(int, given["time"].split(":"))
    assert grace(inner) < int(given["signal"].partition("@")[2])
    assert parse_time(inner[inner.index("--deadline") + 1]) + grace(inner) < hours * 3600 + minutes * 60


def test_the_batch_script_starts_a_supervisor_with_its_journal_and_passes_a_signal_on(tmp_path: Path) -> None:
    tools = {
        "scontrol": "echo first; seq 100000",  # more than a pipe holds: it is to be read to its end
        "srun": 'shift; exec "$@"',
        "tenuto": 'trap "echo asked >> called; exit 143" TERM; echo "$@" > called\n'
        "touch ready; while :; do sleep 0.1; done",
    }
    for name, body in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "20007", "SLURM_JOB_NODELIST": "x", "SLURM_NNODES": "2", "SLURM_NODEID": "1"}
    process = subprocess.Popen(
        ["bash", str(EXAMPLES / "slurm.sbatch")], cwd=tmp_path, env={"PATH": f"{tmp_path}:/usr/bin:/bin", **slurm}
    )
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
    process.terminate()
    assert process.wait(30) == 143
    called, asked = (tmp_path / "called").read_text().splitlines()
    assert called.startswith("run --nodes auto --meet meet/20007 ")
    assert "--journal journals/20007-0-1.jsonl -- torchrun --nnodes 2" in called
    assert "--node-rank 1" in called and "--rdzv-endpoint first:20007" in called
    assert asked == "asked"


@pytest.mark.parametrize(("ends", "queued"), [([0, 0], []), ([1, 1], []), ([137, 17], ["requeue 7"])])
def test_the_batch_script_queues_a_job_again_whose_node_was_lost(
    tmp_path: Path, ends: list[int], queued: list[str]
) -> None:
    """As the journals say: of the statuses of all nodes Slurm tells the highest."""
    for node, status in enumerate(ends):
        journal = Journal(tmp_path / f"ended-{node}", print)
        journal.write("ended", status=status, reason="", lost_s=0.0, step=1, saved=None, failed=True)
    (tmp_path / "scontrol").write_text('#!/bin/bash\n[ "$1" = show ] && echo first || echo "$@" >> queued\n')
    moved = "for node in 0 1; do mv ended-$node journals/7-0-$node.jsonl; done"
    (tmp_path / "srun").write_text(f"#!/bin/bash\n{moved}\nexit {max(ends)}\n")
    for name in ("scontrol", "srun"):
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "x", "SLURM_NNODES": "2", "SLURM_NODEID": "1"}
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **slurm}
    done = subprocess.run(["bash", str(EXAMPLES / "slurm.sbatch")], cwd=tmp_path, env=environment, check=False)
    found = tmp_path / "queued"
    assert (done.returncode, found.read_text().splitlines() if found.exists() else []) == (max(ends), queued)


def test_the_manifest_has_what_a_pod_needs_to_save_and_to_resume_from_memory() -> None:
    claim, jobset = yaml.safe_load_all((EXAMPLES / "kubernetes/jobset.yaml").read_text())
    assert (claim["apiVersion"], claim["kind"]) == ("v1", "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"] and claim["spec"]["resources"]["requests"]["storage"]
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (job["completionMode"], job["backoffLimit"]) == ("Indexed", 0) and job["parallelism"] == job["completions"]
    pod: dict[str, Any] = job["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["restartPolicy"] == "Never"
    command = container["command"]
    assert command[:2] == ["tenuto", "run"] and f"--nnodes={job['completions']}" in command
    assert command[command.index("--nodes") + 1] == str(job["completions"])
    meet = Path(command[command.index("--meet") + 1])
    stop_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > grace(container["command"]) + stop_s
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert volumes[mounts["/checkpoints"]]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert meet.is_relative_to("/checkpoints") and meet.name == jobset["metadata"]["name"]
    name = f"{jobset['metadata']['name']}-{replicated['name']}-0-0.{jobset['metadata']['name']}"
    assert f"--rdzv-endpoint={name}:29500" in container["command"]


@pytest.mark.parametrize("setting", ["KillMode=mixed", "Restart=on-abnormal", "TimeoutStopSec=150"])
def test_the_unit_gives_the_supervisor_the_signal_and_its_training_time(setting: str) -> None:
    text = (EXAMPLES / "tenuto-train.service").read_text()
    assert setting in text.splitlines()
    (start,) = (line.partition("=")[2] for line in text.splitlines() if line.startswith("ExecStart="))
    assert grace(shlex.split(start)) < 150
