"""Ranks that are real processes, restoring from a store that is far away."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np

from support import forked_processes as forked
from tenuto.engine.staging import slots

NBYTES = 24 << 20
PATIENCE_S = 120.0
RANKS_TIMEOUT_S = 8.0


class FarAway:
    """A store of local files that nobody sees the page cache of. Counts what is read of packs, and may end the process
    in the midst of what it reads for others."""

    def __init__(self, path: str, kill_after: int | None) -> None:
        from tenuto.store.registry import open_store

        self._inner = open_store(path)
        self._kill_after = kill_after
        self._guard = threading.Lock()
        self.bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def open(self, name: str) -> Any:
        return FarReader(self, self._inner.open(name), counted=name.endswith(".safetensors"))

    def count(self, nbytes: int) -> None:
        with self._guard:
            self.bytes += nbytes
            if self._kill_after is not None and threading.current_thread().name.startswith("tenuto-read"):
                self._kill_after -= 1
                if self._kill_after < 0:
                    os.kill(os.getpid(), signal.SIGKILL)


class FarReader:
    alignment = 1

    def __init__(self, store: FarAway, inner: Any, *, counted: bool) -> None:
        self._counted = counted
        self._store = store
        self._inner = inner
        self.length = inner.length

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if self._counted:
            self._store.count(len(buffer))
        self._inner.read_into(offset, buffer)

    def view(self) -> None:
        return None

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> FarReader:
        return self

    def __exit__(self, *words: object) -> None:
        self.close()


def work(place: str, rank: int, of: int, save: bool, kill_after: int | None, pipe: Any) -> None:
    """One rank: saves, or restores what was saved, and says what came of it."""
    import tenuto

    wanted = np.random.default_rng(5).integers(0, 256, NBYTES, np.uint8)
    into = wanted.copy() if save else np.zeros(NBYTES, np.uint8)
    store = FarAway(f"{place}/checkpoints", kill_after)
    try:
        ranks = tenuto.SharedFiles(f"{place}/meet-{of}", rank=rank, world_size=of)
        ckpt = tenuto.Checkpointer(
            store, {"weights": tenuto.replicated(into)}, ranks=ranks, ranks_timeout=RANKS_TIMEOUT_S
        )
        pipe.send(ckpt._training.saving.group.agreement.session.id)
        if save:
            ckpt.step_done()
            ckpt.save(wait=True)
            pipe.send(("saved", 0, True))
        else:
            store.bytes = 0
            ckpt.restore()
            pipe.send(("restored", store.bytes, bool(np.array_equal(into, wanted))))
        ckpt.close()
    except tenuto.TenutoError as error:
        pipe.send((type(error).__name__, getattr(error, "ranks", ()), error.message))
        os._exit(1)  # without waiting for anybody


def job(
    place: Path, of: int, *, save: bool = False, killed: dict[int, int] | None = None
) -> tuple[str, dict[int, Any]]:
    """The session, and what each rank said that came to say something."""
    context = forked.context()
    processes, pipes = [], []
    for rank in range(of):
        here, there = context.Pipe()
        kill_after = (killed or {}).get(rank)
        processes.append(context.Process(target=work, args=(str(place), rank, of, save, kill_after, there)))
        processes[-1].start()
        there.close()
        pipes.append(here)
    try:
        session = {heard(pipe) for pipe in pipes}
        said = {rank: heard(pipe) for rank, pipe in enumerate(pipes)}
        for process in processes:
            process.join(PATIENCE_S)
    finally:
        for process in processes:
            process.kill()
    assert len(session) == 1
    return session.pop(), {rank: one for rank, one in said.items() if one is not None}


def heard(pipe: Any) -> Any:
    """What a rank says; None where it was killed before."""
    assert pipe.poll(PATIENCE_S), "a rank hangs"
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        return None


def windows() -> set[str]:
    return {path.removeprefix("reads/") for path, _ in slots.walk(slots.SHARED_MEMORY) if path.startswith("reads/")}
