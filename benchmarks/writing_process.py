"""What a writing process would cost training: the state is copied into shared memory, and another process digests and
writes it from there, with no second copy.

The least that such a writer must do, so a bound in its favour: no commit, no index, one file; with the digest, the
pieces, the direct writes, the flush and the priority of the product's own writing thread.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import xxhash

from tenuto.concurrency.worker_threads import lower_priority

CHUNK = 256 << 10
PIECE = 16 << 20


class WritingProcess:
    """A process that is there before the first save, and an image in shared memory that both have mapped."""

    def __init__(self, tensors: Sequence[torch.Tensor], path: Path) -> None:
        sizes = [one.numel() for one in tensors]
        self._tensors = list(tensors)
        nbytes = -(-sum(one.nbytes for one in tensors) // PIECE) * PIECE
        self._image = mmap.mmap(-1, nbytes)  # shared and anonymous: a forked child has it too
        flat = torch.frombuffer(self._image, dtype=tensors[0].dtype)
        flat.zero_()
        self._places = list(flat[: sum(sizes)].split(sizes))
        self._pipe, other = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(
            target=_serve, args=(other, self._pipe, self._image, path), daemon=True
        )
        self._process.start()
        other.close()

    def begin(self) -> Callable[[], object]:
        """Copies the state and sends for the writer. What is returned waits until the file is flushed."""
        for place, tensor in zip(self._places, self._tensors, strict=True):
            place.copy_(tensor.view(-1))
        self._pipe.send(True)
        return self._pipe.recv

    def close(self) -> None:
        self._pipe.close()  # the other end meets its end of file
        self._process.join()


def _serve(pipe: Connection, far_end: Connection, image: mmap.mmap, path: Path) -> None:
    """In the writing process, which runs nothing of torch."""
    far_end.close()  # or the end of it is never met here
    lower_priority()
    view = memoryview(image)
    while True:
        try:
            pipe.recv()
        except EOFError:
            os._exit(0)
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)
        for start in range(0, len(view), PIECE):
            for chunk in range(start, start + PIECE, CHUNK):
                xxhash.xxh3_128_digest(view[chunk : chunk + CHUNK])
            os.pwritev(descriptor, [view[start : start + PIECE]], start)
        os.fsync(descriptor)
        os.close(descriptor)
        path.unlink()
        pipe.send(True)
