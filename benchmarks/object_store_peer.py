"""What others do with a state in a bucket, in a process of their own: `s3fs` needs another botocore than boto3 has.

    python benchmarks/object_store_peer.py {s3fs|s3torchconnector} BUCKET BYTES

Reads lines `save PREFIX` and `load PREFIX`, and answers each with the seconds that it took.
"""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path
from typing import Any

PACKAGES = Path(__file__).resolve().parents[1] / "build" / "peers"
INSTALL = (
    "pip install --no-deps --target build/peers s3fs==2026.9.0 aiobotocore==3.10.0 botocore==1.43.117 aiohttp "
    "aiohappyeyeballs aioitertools aiosignal frozenlist multidict propcache yarl s3torchconnector==1.5.0 "
    "s3torchconnectorclient==1.5.0"
)
REGION = "us-east-1"


def state_of(length: int) -> dict[str, Any]:
    """The state of the benchmark: 16 arrays of bytes that nothing can compress."""
    import torch

    generator = torch.Generator().manual_seed(1)
    each = length // 16
    return {str(n): torch.randint(0, 255, (each,), dtype=torch.uint8, generator=generator) for n in range(16)}


def storage(kind: str, url: str, *, writes: bool) -> Any:
    """Returns the writer or reader, each with the defaults of its documentation."""
    if kind == "s3fs":
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

        return FsspecWriter(url) if writes else FsspecReader(url)
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

    config = S3ClientConfig(force_path_style=True)
    of = S3StorageWriter if writes else S3StorageReader
    return of(region=REGION, path=f"{url}/", s3client_config=config)


def main() -> None:
    kind, bucket, length = sys.argv[1:]
    sys.path.insert(0, str(PACKAGES))
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed.checkpoint as dcp

    state = state_of(int(length))
    into = {name: torch.zeros_like(one) for name, one in state.items()}
    storage(kind, f"s3://{bucket}/none", writes=True)  # imports belong to no measurement
    print("ready", flush=True)
    for line in sys.stdin:
        what, prefix = line.split()
        url = f"s3://{bucket}/{prefix}"
        begun = time.perf_counter()
        if what == "save":
            dcp.save(state, storage_writer=storage(kind, url, writes=True), no_dist=True)
        else:
            dcp.load(into, storage_reader=storage(kind, url, writes=False), no_dist=True)
        seconds = time.perf_counter() - begun
        if what == "load":
            assert all(torch.equal(into[name], state[name]) for name in state), "not what was saved"
        print(seconds, flush=True)


if __name__ == "__main__":
    main()
