"""What `tenuto run` does about what it finds on the machine, with real processes, services and control groups."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import tenuto
from support.scarce_memory import memory_group
from support.supervised import SRC, await_that, events, finished, started
from tenuto.supervisor.detectors.contract import STEPS, Sample

ENDLESS = """
import os, numpy as np, tenuto, pathlib, time
from tenuto import every, on
state, new = {"w": np.zeros(100)}, f"new-{os.getpid()}"  # a file of its own: two may write at once
with tenuto.Checkpointer("ckpts", state, save=SAVE, memory=MEMORY) as ckpt:
    for step in ckpt.steps(10**6):
        state["w"] += 1
        pathlib.Path(new).write_text(f"{os.getpid()} {ckpt.step} {ckpt.stats.committed}")
        os.replace(new, "now")
        time.sleep(0.02)
"""


def endless(save: str = "on.end() | on.signal()", memory: str = "None") -> str:
    return ENDLESS.replace("SAVE", save).replace("MEMORY", memory)


def now(directory: Path) -> list[int]:
    return list(map(int, (directory / "now").read_text().split())) if (directory / "now").exists() else [0, 0, 0]


def actions(directory: Path, finding: str) -> list[str]:
    """Returns what was done about a finding, each time. There may be others, of a machine that is short of memory."""
    found = [one for one in events(directory) if one["event"] == "finding"]
    return [one["action"] for one in found if one["finding"] == finding]


@pytest.fixture
def aws() -> Iterator[dict[str, Any]]:
    """A metadata service of EC2: `grace_s`, once it is set, is when the machine goes."""
    state: dict[str, Any] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.send(200, "a token")

        def do_GET(self) -> None:
            gone = self.path.endswith("/spot/instance-action") and "grace_s" in state
            at = datetime.fromtimestamp(state.get("began_s", 0.0) + state.get("grace_s", 0.0), UTC)
            self.send(200 if gone else 404, json.dumps({"action": "terminate", "time": at.isoformat()}))

        def send(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Is silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state["variables"] = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def notice(aws: dict[str, Any], grace_s: float) -> None:
    aws.update(began_s=time.time(), grace_s=grace_s)


def test_a_spot_machine_that_goes_is_left_in_time_with_the_last_step_saved(tmp_path: Path, aws: dict[str, Any]) -> None:
    process = started(tmp_path, endless(), "--notices", "aws", variables=aws["variables"])
    await_that(lambda: now(tmp_path)[1] > 5)
    notice(aws, 100.0)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "tenuto: preemption: AWS takes this machine in 1 min" in err and "it is asked to leave" in err
    assert "it was asked to leave (preemption: AWS takes this machine" in err
    assert actions(tmp_path, "preemption") == ["leave"]
    assert sum(one["event"] == "started" for one in events(tmp_path)) == 1
    assert tenuto.Repository(tmp_path / "ckpts").latest_step() == now(tmp_path)[1] + 1, "the step under way"


def test_what_is_done_about_a_notice_is_for_the_user_to_say(tmp_path: Path, aws: dict[str, Any]) -> None:
    process = started(
        tmp_path, endless(), "--notices", "aws", "--on", "preemption=save", variables=aws["variables"]
    )  # fmt: skip
    await_that(lambda: now(tmp_path)[1] > 5)
    notice(aws, 100.0)
    await_that(lambda: now(tmp_path)[2] > 0)
    committed_at = now(tmp_path)[1]
    await_that(lambda: now(tmp_path)[1] > committed_at + 20)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert actions(tmp_path, "preemption") == ["save"]


@pytest.mark.long
def test_a_notice_that_is_too_short_for_a_save_has_what_memory_holds_written(
    tmp_path: Path, aws: dict[str, Any]
) -> None:
    slow = """
import time
from tenuto.store.local.store import LocalStore
whole = LocalStore.put_if_absent
def put(store, name, content, **more):
    if name.endswith(".safetensors"):
        time.sleep(8)
    return whole(store, name, content, **more)
LocalStore.put_if_absent = put
"""
    script = slow + endless("every(steps=400)", "every(steps=1)")
    process = started(tmp_path, script, "--notices", "aws", "--json", variables=aws["variables"])
    await_that(lambda: now(tmp_path)[2] > 0)
    reached = now(tmp_path)[1]
    await_that(lambda: now(tmp_path)[1] > reached + 300)  # its beats are read every five seconds
    notice(aws, 9.0)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 137, err
    assert "that is too soon for a step and a save: what is sealed in memory is saved instead" in err
    assert "saved from memory: main/a000" in err
    assert "preemption" in json.loads(out)["reason"]
    assert (tenuto.Repository(tmp_path / "ckpts").latest_step() or 0) > reached + 200


@pytest.mark.long
def test_a_leak_that_fills_the_control_group_is_saved_before_the_kernel_kills_it(tmp_path: Path) -> None:
    script = """
import os, numpy as np, tenuto, time
from tenuto import every, on
state, leak = {"w": np.zeros(100)}, []
with tenuto.Checkpointer("ckpts", state, save=on.end()) as ckpt:
    for step in ckpt.steps(100):
        state["w"] += 1
        if os.environ["TENUTO_RESTART"] == "0":
            leak.append(np.ones(12 << 17))  # 12 MiB
            time.sleep(1)
print(ckpt.step)
"""
    with memory_group(limit=900 << 20) as group:
        process = started(tmp_path, script)
        group.enter(process.pid)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "save" in actions(tmp_path, "memory"), err
    assert [one["kind"] for one in events(tmp_path) if one["event"] == "died"] == ["out of memory"], err
    (died,) = [one["step"] for one in events(tmp_path) if one["event"] == "died"]
    resumed = re.search(r"resumed run main at step (\d+)", err)
    assert out == "100\n" and resumed is not None and died - 40 < int(resumed[1]) < died, err


LOST = """
import pathlib
NVML_ERROR_GPU_IS_LOST, NVML_TEMPERATURE_GPU, nvmlEventTypeXidCriticalError = 15, 0, 8
NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
class NVMLError(Exception):
    def __init__(self, value):
        self.value = value
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetIndex(handle): return handle
def nvmlEventSetCreate(): raise NVMLError(3)
def nvmlDeviceGetTemperature(handle, sensor):
    raise NVMLError(15 if pathlib.Path("lost").exists() else 3)
"""


def test_a_device_that_is_lost_has_the_training_started_again_at_once(tmp_path: Path) -> None:
    (tmp_path / "stand-in").mkdir()
    (tmp_path / "stand-in" / "pynvml.py").write_text(LOST)
    (tmp_path / "lost").touch()
    script = """
import os, numpy as np, tenuto, time
state = {"w": np.zeros(100)}
with tenuto.Checkpointer("ckpts", state) as ckpt:
    for step in ckpt.steps(10**6 if os.environ["TENUTO_RESTART"] == "0" else ckpt.step + 5):
        time.sleep(0.01)
print(tenuto.restart().cause)
"""
    variables = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "stand-in"), SRC])}
    done = finished(tmp_path, script, variables=variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "device\n" and "tenuto: gpu-lost: GPU 0 is lost: it is ended" in done.stderr
    assert actions(tmp_path, "gpu-lost") == ["restart"], "once, though it stays lost"


def test_a_start_and_an_end_that_never_come_count_as_hung(tmp_path: Path) -> None:
    script = """
import os, numpy as np, tenuto, time
start = os.environ["TENUTO_RESTART"]
if start == "0":
    time.sleep(1000)
with tenuto.Checkpointer("ckpts", {"w": np.zeros(100)}) as ckpt:
    for step in ckpt.steps(5):
        pass
if start == "1":
    time.sleep(1000)
print(start)
"""
    (tmp_path / "tenuto.toml").write_text('[supervise]\nend_within = "5s"\n')
    done = finished(tmp_path, script, "--start-within", "8s", "--grace", "1s")
    assert done.returncode == 0 and done.stdout == "2\n", done.stderr
    assert "hung (no first step within 8.00 s)" in done.stderr
    assert "hung (it has not ended within 5.00 s after step 5)" in done.stderr


def test_what_was_read_of_the_machine_and_of_the_training_is_recorded(tmp_path: Path) -> None:
    script = """
import os, numpy as np, tenuto, time
from tenuto import every
with tenuto.Checkpointer("ckpts", {"w": np.zeros(100)}, save=every(steps=50)) as ckpt:
    for step in ckpt.steps(600):
        time.sleep(0.02)
        if os.environ["TENUTO_RESTART"] == "0" and step == 300:
            os.abort()
"""
    done = finished(tmp_path, script, "--record", "samples.jsonl", "--json", "--in-vain", "9")
    assert done.returncode == 0, done.stderr
    found = [Sample.read(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [one.kind for one in found if one.source == "end"] == ["killed", "finished"]
    assert {"memory", "clock", "disk", STEPS} <= {one.source for one in found}
    paces = [one.values["0.step_s"] for one in found if "0.step_s" in one.values]
    assert paces and min(paces) > 0.02
    assert any(name.startswith(str(tmp_path / "ckpts")) for one in found for name in one.values)
    assert json.loads(done.stdout)["sampling_cpu_s"] >= 0


def test_a_training_that_is_no_rehearsal_has_no_faults_to_put_into_itself(tmp_path: Path) -> None:
    done = finished(tmp_path, "import os; print('TENUTO_CHAOS' in os.environ)", variables={"TENUTO_CHAOS": "1"})
    assert done.returncode == 0 and done.stdout == "False\n", done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--notices", "amazon"], "--notices amazon: there are auto, off, aws, gcp, azure"),
        (["--on", "memory=sav"], "there is no 'sav', but note, warn, save, leave, restart"),
        (["--start-within", "soon"], "--start-within='soon' is not a time"),
        (["--record", "/proc/none/samples"], "/proc/none/samples cannot be written"),
    ],
)
def test_what_makes_no_sense_is_refused_before_the_start(tmp_path: Path, options: list[str], message: str) -> None:
    done = finished(tmp_path, "print('started')", *options)
    assert done.returncode == 2 and message in done.stderr and "started" not in done.stdout
