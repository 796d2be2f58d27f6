"""A Ceph gateway, the real S3: the suite, faults, and its processes killed in the middle of puts and of a training."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from stores import training
from stores.cases import Access, Faults, OnServer, Suite
from stores.ceph_gateway import CephGateway
from tenuto.errors import StoreUnavailable
from tenuto.maintenance.verify import assert_whole
from tenuto.store.contract import Bytes
from tenuto.store.registry import open_store
from tenuto.store.wrappers.retry import Patience, RetryingStore


class TestSuite(Suite):
    server_name = "ceph"


class TestAccess(Access):
    server_name = "ceph"


class TestFaults(Faults):
    server_name = "ceph"


class TestKilled(OnServer):
    server_name = "ceph"

    @pytest.mark.parametrize("length", [2000, 20 << 20])
    def test_the_gateway_killed_in_the_middle_of_puts(self, server: CephGateway, place: str, length: int) -> None:
        """What was acknowledged is there; what was not is whole or absent."""
        store = RetryingStore(open_store(place).inner, Patience(attempts=1))  # type: ignore[attr-defined]
        data = np.random.default_rng(2).bytes(length)
        acknowledged: list[str] = []
        refused: list[str] = []
        begun, killed = threading.Event(), threading.Event()

        def put_many() -> None:
            for number in range(200):
                name = f"packs/{number:03}"
                try:
                    store.put_if_absent(name, Bytes(data), token="t0")
                    acknowledged.append(name)
                except StoreUnavailable:
                    refused.append(name)
                    if killed.is_set():
                        return
                finally:
                    begun.set()

        writer = threading.Thread(target=put_many)
        writer.start()
        assert begun.wait(60)
        server.gateway.kill()
        killed.set()
        writer.join(120)
        server.gateway.start(120)
        assert acknowledged and refused
        for name in acknowledged:
            assert server.get(place, name) == data
        for name in refused:
            assert server.get(place, name) in (None, data)
        store.put_if_absent("packs/later", Bytes(data), token="t0")
        assert {entry.length for entry in store.walk("")} == {length}

    def test_all_of_it_killed_in_the_middle_of_a_training(self, server: CephGateway, place: str) -> None:
        """Gateway, OSD and monitor at once: training goes on, saves meanwhile fail or wait, later ones commit."""
        job = self.start(place, 12)
        committed = self.committed(job, 3)
        server.kill()
        server.restart()
        committed += self.committed(job, 1000)
        assert job.wait(300) == 0 or committed[-1] < 12, job.returncode
        self.check(place, committed)

    def test_training_and_gateway_killed_at_once(self, server: CephGateway, place: str) -> None:
        job = self.start(place, 1000)
        committed = self.committed(job, 3)
        server.gateway.kill()
        job.kill()
        committed += self.committed(job, 1000)
        server.gateway.start(120)
        self.check(place, committed)
        last = committed[-1] + 3
        resumed = self.start(place, last)
        committed += self.committed(resumed, 1000)
        assert resumed.wait(300) == 0
        assert committed[-1] == last
        self.check(place, committed)

    def start(self, place: str, steps: int) -> subprocess.Popen[str]:
        program = Path(training.__file__)
        return subprocess.Popen(
            [sys.executable, str(program), place, str(steps)], stdout=subprocess.PIPE, text=True, env=os.environ.copy()
        )

    def committed(self, job: subprocess.Popen[str], most: int) -> list[int]:
        """Returns the steps that a job says are committed, up to so many, or until it ends."""
        found: list[int] = []
        assert job.stdout is not None
        while len(found) < most and (line := job.stdout.readline()):
            if line.startswith("committed "):
                found.append(int(line.split()[1]))
        return found

    def check(self, place: str, committed: list[int]) -> None:
        repository = tenuto.Repository(place)
        there = [id.step for id in repository.checkpoints("main")]
        assert committed and set(committed) <= set(there)
        for step in (max(there), committed[-1], committed[0]):
            found: Any = tenuto.load(place, step=step).state["w"]
            assert np.array_equal(found, training.state_at(step))
        assert_whole(repository.repo)
