"""Memory, a disk and S3 on a real Ceph gateway: what the guide to tiers tells, on one rank and on several, and what a
training does while its S3 tier is lost."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from stores import tiers_program, training
from stores.cases import OnServer
from support.said import lines_said
from tenuto import Tier, Tiers, every, keep
from tenuto.engine.read.copy_packs import copy_pack
from tenuto.errors import RepositoryError
from tenuto.events import TierLag
from tenuto.maintenance.verify import assert_whole

EXAMPLE = Path(__file__).parents[2] / "examples/tiers.py"
STEPS = 1000
TESTS = str(Path(__file__).resolve().parents[1])


class Job:
    """A process, and the lines that it has printed."""

    def __init__(self, *words: object, cwd: Path) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, [TESTS, os.environ.get("PYTHONPATH")])),
            },
        )

    def until(self, pattern: str) -> str:
        """Returns the first line from now on that matches."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if re.search(pattern, line):
                return line.rstrip()
        raise AssertionError(f"no line has {pattern!r}: {self.lines}")

    def end(self) -> str:
        """Waits for its end, which is a good one. Returns what it has printed."""
        assert self.process.stdout is not None
        self.lines += [line.rstrip() for line in self.process.stdout]
        assert self.process.wait(60) == 0, self.lines
        return "\n".join(self.lines)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def job(*words: object, cwd: Path) -> Iterator[Job]:
    """Starts a process; none is left."""
    started = Job(*words, cwd=cwd)
    try:
        yield started
    finally:
        started.kill()
        assert started.process.stdout is not None
        started.process.stdout.close()


def leaves(where: object, step: int | str = "latest") -> dict[str, Any]:
    """Returns every tensor of a checkpoint, but the random generators that the example neither seeds nor uses."""
    with tenuto.open(where, step=step) as opened:  # type: ignore[arg-type]
        return {path: leaf.numpy() for path, leaf in opened.items() if not re.search("/(python|numpy)/", path)}


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    different = [path for path in one if not np.array_equal(one[path], other[path])]
    assert not different


class TestTheGuide(OnServer):
    server_name = "ceph"

    def test_killed_then_without_memory_then_without_its_disk(self, place: str, tmp_path: Path) -> None:
        """Each start resumes from the fastest tier that is left; the end is that of a training that nobody touched."""
        disk, bucket = tmp_path / "nvme/ckpts", f"{place}/ckpts"
        script = (EXAMPLE, "nvme/ckpts", bucket, "--steps", STEPS)
        clear = ("-m", "tenuto", "memory", "clear", "nvme/ckpts", "--yes")
        with job(*script, cwd=tmp_path) as first:
            first.until("^step  300 ")
            first.kill()
        with job(*script, cwd=tmp_path) as second:
            resumed = second.until("resumed run main")
            found = re.search(rf"at step (\d+) from memory, .* the newest checkpoint in {disk} is step (\d+)$", resumed)
            assert found is not None and int(found[1]) > int(found[2]), resumed
            second.until("^step  600 ")
            second.kill()
        with job(*clear, cwd=tmp_path) as cleared:
            cleared.end()
        with job(*script, cwd=tmp_path) as third:
            resumed = third.until("resumed run main")
            assert re.search(rf"at step [4-6]00 from {disk} ", resumed)
            third.until("^step  800 ")
            third.kill()
        with job(*clear, cwd=tmp_path) as cleared:
            cleared.end()
        shutil.rmtree(disk)
        with job(*script, cwd=tmp_path) as last:
            taken = last.until("does not have the newest checkpoints")
            assert taken.endswith(f"takes over step 500 from {bucket}, in the background")
            assert f"at step 500 from {bucket} " in last.until("resumed run main")
            last.end()

        with job(EXAMPLE, "untouched/ckpts", f"{place}/untouched", "--steps", STEPS, cwd=tmp_path) as untouched:
            untouched.end()
        expected = leaves(tmp_path / "untouched/ckpts")
        for where in (disk, bucket):
            assert_equal(leaves(where, STEPS), expected)
            assert_whole(tenuto.Repository(where).repo)


class TestRanks(OnServer):
    server_name = "ceph"

    @pytest.mark.parametrize("of", [2, 4])
    def test_ranks_killed_then_without_memory_and_any_disk(self, place: str, tmp_path: Path, of: int) -> None:
        with self.lives(tmp_path, place, 1000, of) as ranks:
            ranks[0].until("^bucket has ")
            reached = int(ranks[0].until("^step ").split()[1])
        with self.lives(tmp_path, place, 1000, of) as ranks:
            # A rank may have been killed before it had the step in memory that is committed on the disks.
            where = rf"(memory|the memory of \d+ of {of} ranks and {tmp_path}/|{tmp_path}/)"
            resumed = re.search(rf"at step (\d+) from {where}", ranks[0].until("resumed run main"))
            assert resumed is not None, ranks[0].lines
            assert int(resumed[1]) >= reached - 1
            in_bucket = int(ranks[0].until("^bucket has ").split()[2])
        with job("-m", "tenuto", "memory", "clear", tmp_path / "shared", "--yes", cwd=tmp_path) as cleared:
            cleared.end()
        for directory in ("node0", "node1", "shared", "ranks"):
            shutil.rmtree(tmp_path / directory)
        last = reached + 20
        with self.lives(tmp_path, place, last, of) as ranks:
            resumed = re.search(rf"at step (\d+) from {place}/run ", ranks[0].until("resumed run main"))
            assert resumed is not None and int(resumed[1]) >= in_bucket
            for rank in ranks:
                rank.end()
        expected = np.arange(tiers_program.FLOATS, dtype=np.float64)
        for step in range(last):
            training.train(expected, step)
        for where in (tmp_path / "shared", f"{place}/run"):
            found: Any = tenuto.load(where)
            assert found.checkpoint.step == last and np.array_equal(found.state["w"], expected)
            assert_whole(tenuto.Repository(where).repo)

    @contextmanager
    def lives(self, directory: Path, place: str, steps: int, of: int) -> Iterator[list[Job]]:
        """Starts the ranks of a job; kills those that are left at the end."""
        with ExitStack() as stack:
            yield [
                stack.enter_context(
                    job(tiers_program.__file__, directory, f"{place}/run", steps, rank, of, cwd=directory)
                )
                for rank in range(of)
            ]


class TestTheBucketIsLost(OnServer):
    server_name = "ceph"

    @contextmanager
    def training(self, disk: Path, bucket: str, steps: int) -> Iterator[tuple[tenuto.Checkpointer, Tiers]]:
        where = Tiers(Tier(disk), Tier(bucket, keep=keep.all()))
        w = training.state_at(0)
        with tenuto.Checkpointer(where, {"w": w}, save=every(steps=1)) as ckpt:
            for step in ckpt.steps(steps):
                training.train(w, step)
                ckpt.wait()
            ckpt.wait()
            yield ckpt, where

    def test_the_gateway_killed_in_the_middle_of_a_drain(
        self, server: Any, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Training continues, the lag is known and said; once the gateway is back all that is due is whole there."""
        disk, bucket = tmp_path / "disk", f"{place}/run"
        killed, failed = threading.Event(), threading.Event()

        def copy(*arguments: Any, **named: Any) -> Any:
            if not killed.is_set():
                server.gateway.kill()
                killed.set()
            return copy_pack(*arguments, **named)

        def heard(event: object) -> None:
            if isinstance(event, TierLag) and event.error:
                failed.set()

        monkeypatch.setattr("tenuto.maintenance.place_copy.copy_pack", copy)
        where = Tiers(Tier(disk), Tier(bucket, keep=keep.all()))
        w = training.state_at(0)
        with lines_said() as lines:
            with tenuto.Checkpointer(where, {"w": w}, save=every(steps=1), sinks=[heard], log="default") as ckpt:
                for step in ckpt.steps(6):
                    training.train(w, step)
                    ckpt.wait()
                    if step == 1:  # the first save is committed
                        assert killed.wait(60)
                ckpt.wait()
                assert ckpt.latest_step() == 6
                assert failed.wait(120)
                (lag,) = where.lag()
                assert lag.behind and lag.error and lag.newest is None
                server.gateway.start(120)
            told = [line for line in lines if bucket in line]
        assert len(told) == 2, told
        assert "cannot be filled, training continues without it" in told[0]
        assert "is filled again: it has what is due" in told[1]
        found: Any = tenuto.load(bucket)
        assert found.checkpoint.step == 6 and np.array_equal(found.state["w"], training.state_at(6))
        assert_whole(tenuto.Repository(bucket).repo)

    @pytest.mark.parametrize("what", ["bucket", "key"])
    def test_a_wrong_bucket_and_a_wrong_key(
        self, server: Any, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
    ) -> None:
        """Without a checkpoint that is an error; with one training continues, and one line says why."""
        disk, bucket = tmp_path / "disk", f"{place}-absent/run" if what == "bucket" else f"{place}/run"
        tenuto.save({"w": training.state_at(0)}, disk, step=0)
        if what == "key":
            for name, value in server.wrong_credentials.items():
                monkeypatch.setenv(name, value)
        with pytest.raises(RepositoryError, match="which may have its checkpoints, cannot be asked") as caught:
            with self.training(tmp_path / "new", bucket, 3):
                pass
        assert bucket in caught.value.message and caught.value.hint
        with lines_said() as lines, self.training(disk, bucket, 3):
            assert tenuto.load(disk).checkpoint.step == 3
            told = [line for line in lines if bucket in line]
        assert len(told) == 1 and "training continues without it: " in told[0], told
        assert not any(value in line for value in server.wrong_credentials.values() for line in lines)

    def test_commands_where_the_gateway_hangs(self, server: Any, place: str, tmp_path: Path) -> None:
        """They show what the primary has, and name the bucket in one line."""
        with self.training(tmp_path / "disk", f"{place}/run", 3):
            pass
        server.gateway.pause()
        try:
            for command in ("ls", "status"):
                with job("-m", "tenuto", command, tmp_path / "disk", cwd=tmp_path) as asked:
                    shown = asked.end()
                assert shown.count(f"note: {place}/run is left out") == 1 and "3" in shown
                assert "stamina" not in shown
        finally:
            server.gateway.resume()
