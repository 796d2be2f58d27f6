"""P22: checkpoints in an object store: drains, restores, memory, a training meanwhile, and `latest` of a long run.

    python benchmarks/p22_object_store.py

The store is a Ceph RADOS gateway on loopback, whose disk is a file in memory (`make test-stores` installs it). It
shares the processors with its client, so figures are ratios to plain puts and gets of equal size by the same client
(obstore), four parts of 16 MiB and 16 ranges of 8 MiB at once. dcp with s3fs runs with its defaults, where
`build/peers` has it (object_store_peer.py says how). s3torchconnector 1.5 cannot save to this gateway: it asks for
an ETag in the reply to a completed upload, which Ceph 16 leaves out (`--peers` tries it). A drain reads a checkpoint
from a directory of the same memory, verifies it, and uploads it. Of `latest`, the lease of a training says which step
was committed last, at most a beat ago; where an old one is all there is, everything behind that is listed.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import torch
from grown_repository import grow
from harness import Contender, Result, Target, arguments, compare, median_interval, note, report, timed
from object_store_peer import INSTALL, PACKAGES, state_of
from obstore.store import S3Store

import tenuto
from tenuto import Tier, Tiers, every, keep, on
from tenuto.maintenance.tier_copies import fill_now
from tenuto.model.ids import CheckpointId
from tenuto.repo.format.small_records import decode_lease, encode_lease
from tenuto.repo.lineage import latest
from tenuto.repo.ownership.lease import read_last
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store
from tenuto.testing.fault_proxy import FaultProxy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from stores.ceph_gateway import CephGateway

DRAIN, SAVE, RESTORE, PUTS, GETS = "tenuto, drain", "tenuto.save", "tenuto.load", "plain puts", "plain gets"
PEERS = ("s3fs", "s3torchconnector")
PUT, READ = 16 << 20, 8 << 20
PUT_AT_ONCE, READ_AT_ONCE = 4, 16
MIB = 1 << 20
KEPT, LATENCY_S = 10_000, 0.1
PARTS = ("speed", "training", "memory", "latest")


@contextmanager
def gateway(parent: Path) -> Iterator[CephGateway]:
    """A gateway that keeps its disk below `parent`."""
    home = Path(tempfile.mkdtemp(prefix="tenuto-ceph-", dir=parent))
    server = CephGateway(home)
    try:
        server.start()
        os.environ.update(server.environment())
        yield server
    finally:
        server.stop()
        shutil.rmtree(home, ignore_errors=True)


def yields(server: CephGateway) -> None:
    """Has the gateway take what the processors have left from now on: a real one has processors of its own."""
    for process in (server._monitor, server._osd, server.gateway):
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), 19)


def new_name() -> str:
    return secrets.token_hex(4)


# --------------------------------------------------------------------------------------------------
# Speed, in pairs.


class Peer:
    """Another tool, in a process with packages of its own."""

    def __init__(self, kind: str, bucket: str, length: int) -> None:
        script = str(Path(__file__).with_name("object_store_peer.py"))
        self._process = subprocess.Popen(
            [sys.executable, script, kind, bucket, str(length)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready", f"{kind} did not start: {INSTALL}"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def measure(self, what: str, prefix: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what} {prefix}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def drained(home: Path, url: str) -> Callable[[], None]:
    """Returns what brings the bucket the newest of the two checkpoints in `home`, which this call copies by hard links:
    the tier has the other one, as every tier has but at the first time."""
    mine = home.with_name(new_name())
    shutil.copytree(home, mine, copy_function=os.link)
    repo = Repo.open(open_store(Tiers(Tier(mine), Tier(url))))
    small, large = repo.checkpoints()
    failed: list[str] = []

    def drain(id: CheckpointId) -> None:
        fill_now(repo, id, failed.append)
        assert not failed, failed

    drain(small)
    return lambda: drain(large)


def kept_in(home: Path, state: dict[str, Any]) -> None:
    """Makes what `drained` takes: a small checkpoint, and one of the state."""
    tenuto.save({"small": np.zeros(1)}, home)
    tenuto.save(state, home)


def measure_speed(result: Result, options: argparse.Namespace, bucket: str, place: Path) -> None:
    length = result.bytes
    state = {"model": state_of(length)}
    target = {"model": {name: torch.empty_like(one) for name, one in state["model"].items()}}
    flat, into = torch.cat(list(state["model"].values())).numpy(), np.empty(length, np.uint8)
    plain = S3Store(bucket, client_options={"allow_http": True}, endpoint=os.environ["AWS_ENDPOINT_URL"])
    where, home = f"s3://{bucket}", place / "home"
    kept_in(home, state)

    def put(number: int, under: str) -> None:
        piece = memoryview(flat[number * PUT : (number + 1) * PUT])
        obstore.put(plain, f"{under}/{number}", piece, use_multipart=False)

    def get(number: int) -> None:
        found = obstore.get_range(plain, "whole", start=number * READ, length=READ)
        np.positive(np.frombuffer(memoryview(found), np.uint8), out=into[number * READ : (number + 1) * READ])

    def parallel(work: Callable[[int], None], items: int, at_once: int) -> float:
        with ThreadPoolExecutor(at_once) as pool:
            return timed(lambda: list(pool.map(work, range(items))))

    def puts() -> float:
        under = new_name()
        return parallel(lambda number: put(number, under), -(-length // PUT), PUT_AT_ONCE)

    tenuto.save(state, f"{where}/restored")
    obstore.put(plain, "whole", memoryview(flat), use_multipart=True, chunk_size=PUT, max_concurrency=PUT_AT_ONCE)
    peers = {kind: Peer(kind, bucket, length) for kind in options.peers if PACKAGES.exists()}
    result.facts["left_out"] = [kind for kind in PEERS if kind not in peers]
    for kind, peer in peers.items():
        peer.measure("save", f"{kind}-restored")
    contenders = [
        Contender(DRAIN, lambda: timed(drained(home, f"{where}/{new_name()}"))),
        Contender(PUTS, puts),
        Contender(SAVE, lambda: timed(lambda: tenuto.save(state, f"{where}/{new_name()}"))),
        *(
            Contender(f"dcp.save, {kind}", lambda peer=peer: peer.measure("save", new_name()))
            for kind, peer in peers.items()
        ),
        Contender(RESTORE, lambda: timed(lambda: tenuto.load(f"{where}/restored", into=target))),
        Contender(GETS, lambda: parallel(get, length // READ, READ_AT_ONCE)),
        *(
            Contender(f"dcp.load, {kind}", lambda kind=kind, peer=peer: peer.measure("load", f"{kind}-restored"))
            for kind, peer in peers.items()
        ),
    ]
    try:
        result.seconds.update(compare(contenders, rounds=options.rounds, own=DRAIN, note=note))
    finally:
        for peer in peers.values():
            peer.close()
    assert all(torch.equal(target["model"][name], one) for name, one in state["model"].items())
    result.judge(Target("drain: plain puts take >= 0.9 of its time", PUTS, DRAIN, at_least=0.9))
    result.judge(Target("save: plain puts take >= 0.9 of its time", PUTS, SAVE, at_least=0.9))
    result.judge(Target("restore: plain gets take >= 0.9 of its time", GETS, RESTORE, at_least=0.9))


# --------------------------------------------------------------------------------------------------
# A training while its last checkpoint is drained.


def measure_training(result: Result, options: argparse.Namespace, bucket: str, place: Path) -> None:
    """Steps of a training with one thread while a tier is filled, beside its steps when all tiers have what is due."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 512, generator=generator) for _ in range(2))
    state = {"model": state_of(result.bytes)}
    where = Tiers(Tier(place / "training"), Tier(f"s3://{bucket}/{new_name()}", bandwidth=options.bandwidth))
    filling, idle = "a step while a tier is filled", "a step beside"
    found: dict[str, list[float]] = {filling: [], idle: []}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def step() -> float:
        return timed(lambda: [torch.matmul(a, b) for _ in range(4)])

    try:
        with tenuto.Checkpointer(where, state, save=on.end(), keep=keep.latest(1), data=None) as ckpt:
            for number in range(options.trainings + 1):
                ckpt.step_done()
                id = ckpt.save().wait()
                during = []
                while not any(lag.newest == id for lag in where.lag()):
                    during.append(step())
                after = [step() for _ in during]
                if number:
                    found[filling].append(float(np.mean(during)))
                    found[idle].append(float(np.mean(after)))
                note(f"training {number} of {options.trainings}: {len(during)} steps while a tier is filled")
    finally:
        torch.set_num_threads(threads)
    result.seconds.update(found)
    result.facts["bandwidth of the tier that is filled beside a training"] = options.bandwidth
    result.judge(Target("a step while a tier is filled <= 1.05 of one beside", filling, idle, at_most=1.05))


# --------------------------------------------------------------------------------------------------
# Memory of a large upload.


def resident(what: str) -> int:
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def peak_of(work: Callable[[], object]) -> int:
    """Returns the most memory that the process had beyond what it has now, page cache that it mapped left out."""
    seen, done = [0], threading.Event()

    def look() -> None:
        while not done.wait(0.005):
            seen.append(resident("RssAnon") + resident("RssShmem"))

    before = resident("RssAnon") + resident("RssShmem")
    looking = threading.Thread(target=look)
    looking.start()
    try:
        work()
    finally:
        done.set()
        looking.join()
    return max(seen) - before


def measure_memory(result: Result, options: argparse.Namespace) -> None:
    """A state that was never written to takes no memory, so all that is seen is the save's: its window and its parts.
    In a process of its own, whose gateway has its disk on a disk."""
    length = int(options.upload_gib * (1 << 30))
    disk = Path(__file__).resolve().parents[1] / "build"
    place = Path(tempfile.mkdtemp(prefix="tenuto-memory-", dir=disk))
    try:
        with gateway(disk) as server:
            url = server.new_place()
            tenuto.save({"x": np.zeros(1)}, f"{url}/small")  # the client and its threads are there
            state = {str(n): np.zeros(length // 16, np.uint8) for n in range(16)}
            save = peak_of(lambda: tenuto.save(state, f"{url}/saved"))
            note(f"the save took {save >> 20} MiB")
            window = peak_of(lambda: kept_in(place / "home", state))
            note(f"the same save into a directory took {window >> 20} MiB")
            drain = peak_of(drained(place / "home", f"{url}/drained"))
            note(f"the drain took {drain >> 20} MiB")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    result.memory = {SAVE: [save], "tenuto.save into a directory": [window], DRAIN: [drain]}
    result.facts["bytes of the upload whose memory is measured"] = length
    for name, nbytes in (("a drain", drain), ("a save, beyond that of one into a directory", save - window)):
        value = nbytes / MIB
        text = f"memory of an upload of {options.upload_gib:g} GiB by {name} <= 128 MiB"
        result.judge_value(text, (value, value, value), at_most=128, unit="mib")


# --------------------------------------------------------------------------------------------------
# What a long run means, a tenth of a second away.


def measure_latest(result: Result, server: CephGateway) -> None:
    url = server.new_place()
    with tenuto.Checkpointer(url, {"w": np.zeros(4)}, save=every(steps=1), keep=keep.all(), data=None) as ckpt:
        for _ in ckpt.steps(1):
            pass
    repo = Repo.open(open_store(url))
    with ThreadPoolExecutor(16) as pool:
        puts = []

        def put(name: str, data: bytes) -> None:
            if name.endswith(".json"):  # nobody who asks for the newest looks at data files
                puts.append(pool.submit(server.put, url, name, data))

        grow(repo, CheckpointId("main", 1, 1), range(2, KEPT + 1), put)
        for one in puts:
            one.result()
    note(f"{KEPT} checkpoints are there")
    newest = CheckpointId("main", 1, KEPT)
    number, beat = read_last(repo, "main", 1)
    assert beat is not None
    with FaultProxy(server.endpoint, latency_s=LATENCY_S) as proxy:
        os.environ["AWS_ENDPOINT_URL"] = proxy.url

        def look() -> float:
            begun = time.perf_counter()
            found = latest(Repo.open(open_store(url)), "main")
            seconds = time.perf_counter() - begun
            assert found == newest, found
            return seconds

        said, unsaid = "latest of 10,000, its lease names it", "latest of 10,000, its lease names an older one"
        result.seconds[unsaid] = [look() for _ in range(3)]
        told = encode_lease(replace(beat, number=number + 1, newest=KEPT), "main", 1, repo.id)
        server.put(url, f"runs/main/a0001/lease/{number + 1}.json", told)
        assert decode_lease(told, "main", 1, number + 1, repo.id).newest == KEPT
        look()
        proxy.forget()
        result.seconds[said] = [look() for _ in range(7)]
        result.facts[f"requests of {said}"] = sum(proxy.counts().values()) / 7
    os.environ["AWS_ENDPOINT_URL"] = server.endpoint
    middle, low, high = (1e3 * one for one in median_interval(result.seconds[said]))
    text = f"{said}, 100 ms away <= 1 s"
    result.judge_value(text, (middle, low, high), at_most=1000, unit="ms")


def options_of(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=["s3fs"], help="beside which (default: s3fs)")
    parser.add_argument("--what", nargs="*", choices=PARTS, default=list(PARTS), help="which parts (default: all)")
    parser.add_argument("--bandwidth", default="100MB/s", help="of the tier beside a training (default %(default)s)")
    parser.add_argument("--trainings", type=int, default=9, help="pairs of measurements beside a training")
    parser.add_argument("--upload-gib", type=float, default=4.0, help="of the upload whose memory is measured")


def main() -> None:
    options = arguments(__doc__ or "", add=options_of, gib=0.125, leaves=16, rounds=13)
    result = Result("p22_object_store", {}, int(options.gib * (1 << 30)) // PUT * PUT)
    result.facts["server"] = "Ceph RADOS gateway on loopback, its disk a file in memory"
    if "memory" in options.what:
        measure_memory(result, options)
    with (
        tempfile.TemporaryDirectory(prefix="tenuto-p22-", dir="/dev/shm") as place,
        gateway(Path("/dev/shm")) as server,
    ):
        bucket = server.new_place().removeprefix("s3://")
        if "latest" in options.what:
            measure_latest(result, server)
        if "speed" in options.what:
            measure_speed(result, options, bucket, Path(place))
        if "training" in options.what:
            yields(server)
            measure_training(result, options, bucket, Path(place))
        report(result, options, Path(place))


if __name__ == "__main__":
    main()
