"""Places where ranks meet, and what may become of them: a server of its own that is killed or stopped, a directory that
is gone, empty or does not answer."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from campaigns.ports import HOST
from campaigns.rank_kills.processes import Death, Plan
from tenuto.ranks.contract import KVStore, Ranks
from tenuto.ranks.kv.shared_files import SharedFilesKVStore
from tenuto.ranks.kv.torch_store import TorchKVStore

SERVES_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """One of the ranks that meet at a board of some other kind than a directory that works."""

    rank: int
    world_size: int
    make: Callable[[], KVStore]

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    def kv_store(self) -> KVStore:
        return self.make()


class Server:
    """A process that serves a TCP store of torch.distributed, as torchrun's agent does. As a context manager it is
    killed in the end."""

    def __init__(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        reader, writer = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                os.close(reader)
                store = TCPStore(HOST, 0, None, True, timedelta(seconds=SERVES_S), wait_for_workers=False)
                os.write(writer, f"{store.port}\n".encode())
                time.sleep(SERVES_S)
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as told:
            self.port = int(told.readline())

    def ranks(self, rank: int, world: int) -> Ranks:
        return Meeting(rank, world, lambda: TorchKVStore(self._connected, f"the store at {HOST}:{self.port}"))

    def _connected(self) -> Any:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        return TCPStore(HOST, self.port, None, False, timedelta(seconds=5), wait_for_workers=False)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


class HangingFiles(SharedFilesKVStore):
    """A directory on a file system whose server answers no more once `stone` is there: a call stays inside."""

    def __init__(self, root: Path, stone: Path) -> None:
        super().__init__(root)
        self._stone = stone

    def _path(self, key: str) -> Path:
        while self._stone.exists():
            time.sleep(0.01)
        return super()._path(key)


@dataclass(frozen=True, slots=True)
class MetAt(Plan):
    """A job whose ranks meet at `server`, or in a directory that may hang."""

    server: Server | None = None
    port: int = 0
    """Where rank 0 serves a TCP store, if it does."""

    def ranks(self, rank: int) -> Ranks:
        if self.port:
            return Meeting(rank, self.world, lambda: served_by_first(rank, self.port))
        if self.server is not None:
            return self.server.ranks(rank, self.world)
        return Meeting(rank, self.world, lambda: HangingFiles(self.place / "ranks", self.place / STONE))


def served_by_first(rank: int, port: int) -> KVStore:
    """The store that the process of rank 0 serves, as in jobs that srun, mpirun or `multiprocessing` start."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TorchKVStore.of(TCPStore(HOST, port, None, rank == 0, timedelta(seconds=60), wait_for_workers=False))


STONE: Final = "hangs"


@dataclass(frozen=True, slots=True)
class StoreDeath(Death):
    """When `rank` comes to `point`, the server `pid` is sent the signal; the rank itself goes on."""

    pid: int = 0

    def strike(self) -> None:
        os.kill(self.pid, self.number)


@dataclass(frozen=True, slots=True)
class DirectoryDeath(Death):
    """The same for the directory `place`/ranks: `how` is gone, emptied or hung."""

    place: Path = Path()
    how: str = "gone"

    def strike(self) -> None:
        ranks = self.place / "ranks"
        if self.how == "hung":
            (self.place / STONE).touch()
            return
        away = self.place / "away"
        ranks.rename(away)
        if self.how == "gone":
            ranks.touch()  # no directory, and none can be made
        else:
            shutil.rmtree(away, ignore_errors=True)


def restored(place: Path) -> None:
    """Nothing is left of what became of the directory: the next job meets there anew."""
    (place / STONE).unlink(missing_ok=True)
    ranks = place / "ranks"
    if ranks.is_file():
        ranks.unlink()
