"""A save to an object store and a restore from it, beside plain parallel puts and gets of equal size by one client.

    python benchmarks/object_store.py --gib 0.25                     # a moto server in a process of its own
    AWS_ENDPOINT_URL=http://127.0.0.1:19102 … python benchmarks/object_store.py --bucket BUCKET

Targets: at most 1 / 0.9 of the plain time each; an upload takes at most 128 MiB of memory beyond the state's copy. Both
sides share the machine with the server: of moto, which is written in Python, the figures are mostly the server's.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import obstore
from harness import Contender, Result, Target, arguments, compare, note, report, timed, workplace
from obstore.store import S3Store

import tenuto

SAVE, RESTORE, PUTS, GETS = "tenuto.save", "tenuto.load", "plain puts", "plain gets"
PUT, READ = 16 << 20, 8 << 20
PUT_AT_ONCE, READ_AT_ONCE = 4, 16
MOTO = """
import werkzeug.serving
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
werkzeug.serving.WSGIRequestHandler.protocol_version = "HTTP/1.1"
server = werkzeug.serving.make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
print(server.port, flush=True)
server.serve_forever()
"""


@contextmanager
def server(bucket: str | None) -> Iterator[str]:
    """Yields a bucket, of moto's unless one is named; the environment says where it is."""
    if bucket is not None:
        yield bucket
        return
    process = subprocess.Popen([sys.executable, "-c", MOTO], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    try:
        endpoint = f"http://127.0.0.1:{int(process.stdout.readline())}"
        os.environ.update(
            AWS_ENDPOINT_URL=endpoint, AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b", AWS_REGION="us-east-1"
        )
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/benchmark", method="PUT")).close()
        yield "benchmark"
    finally:
        process.kill()
        process.wait()


def resident(what: str) -> int:
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


class Peak:
    """The most memory that the process had beyond what it has now, while it ran."""

    def __enter__(self) -> Peak:
        Path("/proc/self/clear_refs").write_text("5")
        self.before = resident("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = resident("VmHWM") - self.before


def options_of(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bucket", help="one that exists, where the environment says; else moto is started")
    parser.add_argument("--noisy", action="store_true", help="say that others used the machine meanwhile")


def main() -> None:
    options = arguments(__doc__ or "", add=options_of)
    length = int(options.gib * (1 << 30)) // READ * READ
    rng = np.random.default_rng(1)
    state: dict[str, Any] = {
        "model": {str(n): rng.integers(0, 255, length // 16, np.uint8) for n in range(16)},
    }
    target = {"model": {name: np.empty_like(leaf) for name, leaf in state["model"].items()}}
    flat, into = np.concatenate(list(state["model"].values())), np.empty(length, np.uint8)
    with server(options.bucket) as bucket, workplace(options) as place:
        plain = S3Store(bucket, client_options={"allow_http": True}, endpoint=os.environ.get("AWS_ENDPOINT_URL"))
        here = f"benchmark-{secrets.token_hex(4)}"
        where, memory = f"s3://{bucket}/{here}", []

        def save() -> float:
            with Peak() as peak:
                seconds = timed(lambda: tenuto.save(state, f"{where}/{secrets.token_hex(4)}"))
            memory.append(peak.bytes)
            return seconds

        def put(number: int) -> None:
            obstore.put(
                plain,
                f"{here}/plain/{number}",
                memoryview(flat[number * PUT : (number + 1) * PUT]),
                use_multipart=False,
            )

        def get(number: int) -> None:
            found = obstore.get_range(plain, f"{here}/whole", start=number * READ, length=READ)
            np.positive(np.frombuffer(memoryview(found), np.uint8), out=into[number * READ : (number + 1) * READ])

        def parallel(work: Any, items: int, at_once: int) -> None:
            with ThreadPoolExecutor(at_once) as pool:
                list(pool.map(work, range(items)))

        tenuto.save(state, f"{where}/restored")
        obstore.put(
            plain, f"{here}/whole", memoryview(flat), use_multipart=True, chunk_size=PUT, max_concurrency=PUT_AT_ONCE
        )
        contenders = [
            Contender(SAVE, save),
            Contender(PUTS, lambda: timed(lambda: parallel(put, -(-length // PUT), PUT_AT_ONCE))),
            Contender(RESTORE, lambda: timed(lambda: tenuto.load(f"{where}/restored", into=target))),
            Contender(GETS, lambda: timed(lambda: parallel(get, length // READ, READ_AT_ONCE))),
        ]
        seconds = compare(contenders, rounds=options.rounds, own=SAVE, note=note)
        assert all(np.array_equal(target["model"][name], leaf) for name, leaf in state["model"].items())
        result = Result("object_store", seconds, length, sized=True)
        result.facts["server"] = "moto" if options.bucket is None else "as the environment said"
        result.facts["most memory beyond the start while saving, state's copy included, MiB"] = max(memory) >> 20
        if options.noisy:
            result.facts["noise"] = "others used the processors meanwhile"
        result.judge(Target("save: plain puts take >= 0.9 of its time", PUTS, SAVE, at_least=0.9))
        result.judge(Target("restore: plain gets take >= 0.9 of its time", GETS, RESTORE, at_least=0.9))
        report(result, options, place)


if __name__ == "__main__":
    main()
