"""Trainings, commands and readers whose repository is in S3, here moto's."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.moto import Moto, moto, s3  # noqa: F401 - fixtures, of one server for each test
from tenuto import every, keep
from tenuto.model.ids import step_key
from tenuto.repo.repository import Repo
from tenuto.store.objects.service import S3
from tenuto.store.objects.store import ObjectStore
from tenuto.store.registry import open_store
from tenuto.store.wrappers.retry import RetryingStore
from tenuto.testing.fault_proxy import FaultProxy

TRAIN = """
import os, signal, sys
import numpy as np
import tenuto
from tenuto import every, keep, on

where, steps, dies = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
state = {"w": np.zeros(100_000), "b": np.zeros(3)}
with tenuto.Checkpointer(where, state, save=every(steps=3) | on.end(), keep=keep.latest(2)) as ckpt:
    for step in ckpt.steps(steps):
        state["w"] += step + 1
        if step == 9:
            ckpt.wait()
        if step == dies:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=240, **options)


def command(*arguments: str) -> str:
    done = python("-m", "tenuto", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_training_is_killed_and_resumes(s3: str, tmp_path: Path) -> None:  # noqa: F811
    where = f"{s3}/team/ckpts"
    killed = python("-c", TRAIN, where, "20", "10")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = python("-c", TRAIN, where, "20", "-1")
    assert resumed.returncode == 0, resumed.stderr
    assert f"resumed run main at step 9 from {where}" in resumed.stderr

    expected = np.full(100_000, sum(range(1, 21)), float)
    assert np.array_equal(tenuto.load(where).state["w"], expected)
    with tenuto.open(where) as checkpoint:
        assert np.array_equal(checkpoint["w"][7:9], expected[7:9])
    listed = json.loads(command("ls", "--json", where))
    assert [one["step"] for one in listed["runs"][0]["checkpoints"]] == [20, 18]
    assert where in command("show", where)
    command("export", where, str(tmp_path / "model.safetensors"))
    assert (tmp_path / "model.safetensors").stat().st_size > 800_000
    assert not list(tmp_path.glob("s3*"))  # nowhere taken for a directory


@pytest.mark.parametrize("encoding", ["plain", "small"])
def test_a_training_is_forked_into_s3_drilled_there_and_resumes(s3: str, tmp_path: Path, encoding: str) -> None:  # noqa: F811
    def train(where: Any, steps: int, run: str = "main") -> Any:
        rng = np.random.default_rng(0)
        state = {"w": np.zeros(2000), "rng": rng}
        settings: dict[str, Any] = {"keep": keep.all(), "encoding": encoding, "log": "silent"}
        with tenuto.Checkpointer(where, state, run=run, save=every(steps=2), **settings) as ckpt:
            for _ in ckpt.steps(steps):
                state["w"] += rng.standard_normal(2000)
        return state["w"]

    train(tmp_path / "here", 6)
    tenuto.Repository(tmp_path / "here").copy_to(f"{s3}/there", steps=[4], to_run="fork")
    there = tenuto.Repository(f"{s3}/there")
    there.copy_to(run="fork", to_run="again")
    assert there.drill(run="fork") and there.drill(run="again")
    expected = train(tmp_path / "whole", 8)
    assert np.array_equal(train(f"{s3}/there", 8, "fork"), expected)
    assert np.array_equal(train(f"{s3}/there", 8, "again"), expected)


def test_two_repositories_in_one_bucket_do_not_see_each_other(s3: str) -> None:  # noqa: F811
    for name, value in (("a", 1.0), ("a/b", 2.0), ("ab", 3.0)):
        tenuto.save({"w": np.full(10, value)}, f"{s3}/{name}")
    for name, value in (("a", 1.0), ("a/b", 2.0), ("ab", 3.0)):
        assert np.array_equal(tenuto.load(f"{s3}/{name}").state["w"], np.full(10, value))
        command("verify", f"{s3}/{name}")
    with pytest.raises(tenuto.errors.NotARepository) as caught:
        tenuto.load(s3)
    assert f"{s3}/a" in str(caught.value.hint)


def test_gc_frees_the_uploads_of_killed_saves(s3: str, moto: Moto) -> None:  # noqa: F811
    """Those of a save that was never finished, and one beside a checkpoint; and none that lies elsewhere."""
    where = f"{s3}/ckpts"
    tenuto.save({"w": np.zeros(10)}, where)
    repo = Repo.open(open_store(where))
    client, bucket = moto.client(), s3.removeprefix("s3://")
    pack = next(entry.name for entry in repo.store.walk("runs") if entry.name.endswith(".safetensors"))
    ours, foreign = f"ckpts/{pack}", "elsewhere/x.safetensors"
    for key in (ours, foreign):
        client.create_multipart_upload(Bucket=bucket, Key=key)
    assert ".tmp-" in command("gc", where, "--dry-run", "--grace", "0")
    command("gc", where, "--grace", "0", "--yes")
    assert [one["Key"] for one in client.list_multipart_uploads(Bucket=bucket)["Uploads"]] == [foreign]
    command("verify", where)


@contextmanager
def asked(moto: Moto, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:  # noqa: F811
    """What is asked of the server, but for leases: each is put by the clock, and from the third on removes one."""
    with FaultProxy(moto.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)

        def without_leases() -> list[str]:
            found: list[str] = []
            old = 0
            for one in proxy.requests:
                if "/lease/" in one.target:
                    old += one.method == "PUT" and not one.target.endswith(("/1.json", "/2.json"))
                elif old and one.target.endswith("?delete"):
                    old -= 1
                else:
                    found.append(f"{one.method} {one.target}")
            return found

        yield without_leases


def train(where: Any, length: int, saves: int, policy: Any) -> None:
    state = {"w": np.zeros(length // 8)}
    with tenuto.Checkpointer(where, state, data=None, save=every(steps=1), keep=policy) as ckpt:
        for _ in ckpt.steps(saves):
            assert all(save.join(120) for save in ckpt._training.saving.saver.in_flight)
            # A round that ends late would be counted for the saves behind it.
            assert ckpt._training.saving.retention._rounds.join(120)


def test_a_save_in_parts_asks_for_nothing_twice(s3: str, moto: Moto, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    with asked(moto, monkeypatch) as requests:
        train(f"{s3}/ckpts", 20 << 20, 3, keep.all())
        ours = requests()
    bucket, step = s3.removeprefix("s3://"), f"ckpts/runs/main/a0001/{step_key(3)}"
    pack = f"/{bucket}/{step}/rank-00000.safetensors"
    last = [re.sub("Id=.*", "Id=", one) for one in ours[ours.index(f"PUT /{bucket}/{step}/begin.json") :]]
    last[4:6] = sorted(last[4:6])
    assert last == [
        f"PUT /{bucket}/{step}/begin.json",
        f"GET /{bucket}?delimiter=/&list-type=2&prefix=ckpts/runs/main/",
        f"HEAD {pack}",
        f"POST {pack}?uploads=",
        f"PUT {pack}?partNumber=1&uploadId=",
        f"PUT {pack}?partNumber=2&uploadId=",
        f"POST {pack}?uploadId=",
        f"PUT /{bucket}/{step}/rank-00000.index",
        f"PUT /{bucket}/{step}/manifest.json",
    ]


def test_a_steady_save_in_parts_makes_at_most_eight_requests_beside_them(
    s3: str,  # noqa: F811
    moto: Moto,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, steady = 40, 20
    with asked(moto, monkeypatch) as requests:
        whole = open_store(s3).inner
        parts = ObjectStore(s3, S3, whole._make, whole._unfinished, single=4096, part=5 << 18)
        train(RetryingStore(parts), 2 << 20, kept + steady, keep.latest(kept))
        ours = requests()
    ends = [n for n, one in enumerate(ours) if one.startswith("PUT") and one.endswith("/manifest.json")]
    window = ours[ends[-steady - 1] + 1 : ends[-1] + 1]
    uploads = [one for one in window if re.search(r"uploads?(Id)?=", one)]
    assert len(uploads) == (1 + 2 + 1) * steady
    assert len(window) - len(uploads) <= 8 * steady


HIGH_WATER = """
import sys
from tenuto.store.registry import open_store

class Content:
    length = int(sys.argv[2])
    def pieces(self):
        room = memoryview(bytearray(1 << 20))
        for at in range(0, self.length, 1 << 20):
            room[:8] = at.to_bytes(8, "little")
            yield room

def high_water():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

store = open_store(sys.argv[1])
class Small(Content):
    length = 1 << 20
store.put_if_absent("warm", Small(), token="t")
before = high_water()
store.put_if_absent("pack", Content(), token="t")
print((high_water() - before) << 10)
with store.open("pack") as reader:
    found = bytearray(8)
    for at in range(0, Content.length, 37 << 20):
        reader.read_into(at, memoryview(found))
        assert int.from_bytes(found, "little") == at, at
"""


def test_an_upload_takes_little_memory_however_long_it_is(s3: str) -> None:  # noqa: F811
    done = python("-c", HIGH_WATER, s3, str(512 << 20))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 128 << 20
