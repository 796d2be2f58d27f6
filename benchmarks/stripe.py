"""A stripe over several places beside one place: a data file put, and read as a restore reads it.

    python benchmarks/stripe.py --places 4

Slow devices are emulated: each place is a local directory that is throttled to `--rate`, reads too, so that what is
measured is whether all places work at the same time. Target: over n places at most 1 / 0.9 n of the time over one.
`disk` is the same without throttles: directories of one disk, which cannot be faster than that disk.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from harness import Contender, Result, Target, arguments, compare, note, report, workplace

from tenuto.bench.raw import aligned, drop_cache
from tenuto.concurrency.worker_threads import parallel_for
from tenuto.model.sizes import parse_rate
from tenuto.store.contract import Bytes, Store
from tenuto.store.registry import open_store
from tenuto.store.wrappers.stripe import Stripe
from tenuto.store.wrappers.throttle import ThrottledStore

RANGE = 1 << 20


def options_here(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--places", type=int, default=4, help="places of the stripe (default 4)")
    parser.add_argument("--rate", default="30MB/s", help="bytes per second of an emulated device (default 30MB/s)")


def measuring(root: Path, places: int, rate: int | None, data: memoryview, direction: str) -> Callable[[], float]:
    def opened() -> Store:
        stores = [open_store(root / str(number)) for number in range(places)]
        if rate is not None:
            stores = [ThrottledStore(store, rate, reads=True) for store in stores]
        return stores[0] if places == 1 else Stripe(*stores)

    def put() -> float:
        shutil.rmtree(root, ignore_errors=True)
        store = opened()
        store.put_if_absent("first", Bytes(b""), token="t0")  # directories and records are there before
        begun = time.perf_counter()
        store.put_if_absent("data.safetensors", Bytes(data), token="t0")
        return time.perf_counter() - begun

    def get() -> float:
        if not root.exists():
            put()
        drop_cache(root)
        store, into = opened(), aligned(len(data)).data
        begun = time.perf_counter()
        with store.open("data.safetensors") as reader:
            starts = range(0, reader.length, RANGE)
            parallel_for(
                lambda start: reader.read_into(start, into[start : start + RANGE]),
                starts,
                store.capabilities.parallel,
            )
        seconds = time.perf_counter() - begun
        assert into == data
        return seconds

    return put if direction == "put" else get


def main() -> None:
    options = arguments(__doc__ or "", add=options_here, gib=0.0625, leaves=1, rounds=5)
    nbytes, rate = int(options.gib * 2**30), parse_rate(options.rate)
    data = aligned(nbytes).data
    with workplace(options) as place:
        contenders = [
            Contender(
                f"{direction}, {what}, {count} of them",
                measuring(place / f"{what}-{count}", count, limit, data, direction),
            )
            for what, limit in (("emulated", rate), ("disk", None))
            for count in (1, options.places)
            for direction in ("put", "get")
        ]
        seconds = compare(contenders, rounds=options.rounds, own=contenders[0].name, note=note)
        result = Result("stripe", seconds, nbytes, facts={"places": options.places, "rate": rate})
        for direction in ("put", "get"):
            many, one = f"{direction}, emulated, {options.places} of them", f"{direction}, emulated, 1 of them"
            text = f"{direction}: over n emulated devices 0.9 n of one or more"
            result.judge(Target(text, many, one, at_most=1 / (0.9 * options.places)))
        report(result, options, place)


if __name__ == "__main__":
    main()
