"""A small world for random histories: simulated processes that train, save, crash and look after one store in memory.

A process that dies takes its store with it: every later call of its threads raises, as if they had been killed too.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from typing import Any
from unittest import mock

import numpy as np

from campaigns.recorded_jobs import Faster, quiet, save_stages
from campaigns.simulated_processes import Processes, replacing
from tenuto.codec.chunk_map import ChunkMap
from tenuto.crashpoints import armed
from tenuto.model.ids import CheckpointId
from tenuto.policy import keep
from tenuto.policy.encoding import Preset
from tenuto.policy.save import every
from tenuto.repo.format.object_names import begin_name
from tenuto.repo.format.small_records import decode_begin
from tenuto.repo.ownership import owner_watch
from tenuto.repo.ownership.claim import Attempt, claim
from tenuto.repo.ownership.owner_watch import OwnerWatch
from tenuto.repo.repository import Repo, now_text
from tenuto.store.memory import MemoryStore, SharedObjects
from tenuto.training import exit_status, run_registry
from tenuto.training.checkpointer import Checkpointer
from tenuto.training.retention_worker import RetentionWorker

_names = itertools.count()
NEVER = 10**9
CHUNK = 64
BEGINNING_S = 1_700_000_000.0


class Gone(BaseException):
    """The process is dead: nothing of it may clean up."""


class MortalStore(MemoryStore):
    """One process's view of a store."""

    def __init__(self, name: str) -> None:
        self.dead = False
        super().__init__(name)

    @property  # type: ignore[misc]
    def place(self) -> SharedObjects:
        if self.dead:
            raise Gone
        return self._place

    @place.setter
    def place(self, place: SharedObjects) -> None:
        self._place = place

    def die(self) -> None:
        self.dead = True
        raise Gone


class Process:
    """One trainer. `attempt`: the number it has claimed, 0 before. A fork of a run trains without a Checkpointer."""

    def __init__(self, world: World, run: str, *, encoding: Preset = "plain", ahead_s: float = 0.0) -> None:
        """`ahead_s`: how far its clock is."""
        self.world, self.run, self.encoding, self.ahead_s = world, run, encoding, ahead_s
        self.number = world.processes.start()
        self.store = MortalStore(world.store.name)
        frozen = np.arange(4 * CHUNK, dtype=np.uint8)
        self.state: dict[str, Any] = {"w": np.zeros(6, np.float32), "frozen": frozen, "n": 0, "text": ""}
        self.ckpt: Checkpointer | None = None
        self.claimed: Attempt | None = None
        self.attempt = 0
        self.step = 0

    def act(self) -> None:
        self.world.processes.current = self.number
        self.world.ahead_s = self.ahead_s

    def open(self, resume_from: Any, *, takeover: bool) -> CheckpointId | None:
        """Restores; what was restored."""
        self.act()
        self.ckpt = Checkpointer(
            self.store,
            self.state,
            run=self.run,
            save=every(steps=NEVER),
            keep=keep.latest(NEVER),
            resume_from=resume_from,
            takeover=takeover,
            encoding=self.encoding,
        )
        restored = self.ckpt.restore()
        self.step = self.ckpt.step
        return restored.checkpoint.id if restored is not None else None

    def claim_fork(self, parent: CheckpointId) -> None:
        """Claims a run that goes on from another run's checkpoint."""
        self.act()
        repo = Repo.open(self.store)
        self.claimed = claim(repo, self.run, parent, wait_s=0.0, observe=OwnerWatch(repo, self.run))
        self.attempt, self.step = self.claimed.number, parent.step

    def change(self, value: float) -> dict[str, Any]:
        """A step of training; a copy of the state that it leads to."""
        self.state["w"] += np.float32(value)
        self.state["n"] += 1
        self.state["text"] = f"step {self.step + 1} of {self.run}"
        return {**self.state, "w": self.state["w"].copy()}

    def save(self) -> CheckpointId:
        """Completes a step and saves it. Raises what the save raises."""
        self.act()
        self.step += 1
        if self.claimed is not None:
            id = CheckpointId(self.run, self.attempt, self.step)
            self.claimed.check()
            for _ in save_stages(self.claimed.repo, self.claimed, id, self.state, os.urandom(16).hex()):
                pass
            return id
        assert self.ckpt is not None
        self.ckpt.step_done(self.step)
        found = self.ckpt.save(wait=True)
        return found.wait()

    def owned(self) -> Attempt:
        """What it has claimed."""
        if self.claimed is not None:
            return self.claimed
        training = self.ckpt._training if self.ckpt is not None else None
        assert training is not None and training.saving.saver.attempt is not None
        return training.saving.saver.attempt

    def disown(self) -> None:
        """Other Checkpointers of this interpreter are other processes' here."""
        if self.ckpt is not None:
            key = (self.world.repo.id, self.run)
            run_registry.unregister(key, self.ckpt)

    def close(self) -> None:
        self.act()
        if self.claimed is not None:
            self.claimed.release()
        elif self.ckpt is not None:
            self.ckpt.close()
        self.world.processes.end(self.number)

    def die(self) -> None:
        """Killed: nothing is given back, but this interpreter's memory."""
        self.store.dead = True
        self.world.processes.end(self.number)
        if self.ckpt is not None and self.ckpt._training is not None:
            self.disown()
            self.ckpt._closed = True
            self.ckpt._withdraw()
            saving = self.ckpt._training.saving
            saving.saver.join(10)
            saving.saver.close()
            saving.retention.join(10)  # its store is dead: what is still under way ends at its next call

    def fork(self) -> int:
        """A forked child uses what its parent owns; 0 if it is refused and does nothing, as it must."""
        child = os.fork()
        if child == 0:
            status = 1
            try:
                self.save()
            except Exception as error:  # noqa: BLE001 - the child must only ever end by _exit
                status = 0 if type(error).__name__ == "ForkedProcess" else 2
            finally:
                os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class World:
    """The store, seen by nobody's process; and the processes there are."""

    def __init__(self) -> None:
        self.processes = Processes(first=100)
        self.store = MemoryStore(f"stateful-{os.getpid()}-{next(_names)}")
        self.repo = Repo.create_or_open(self.store, chunk_bytes=CHUNK)
        self.hours = self.ahead_s = 0.0
        self._needs: dict[CheckpointId, list[tuple[str, int, int]]] = {}

    @property
    def now_s(self) -> float:
        return self.store.place.clock_ns / 1e9

    @property
    def wall_s(self) -> float:
        """What the clock of who acts says, which is not the store's."""
        return BEGINNING_S + self.hours * 3600 + self.ahead_s

    def wall_text(self) -> str:
        return datetime.fromtimestamp(self.wall_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")

    def advance(self, hours: float) -> None:
        self.hours += hours
        self.store.advance(hours * 3600)

    def operator(self) -> None:
        """From now on somebody acts who trains nothing."""
        self.processes.current = 1
        self.ahead_s = 0.0

    def begun_bases(self, id: CheckpointId) -> frozenset[CheckpointId]:
        data, _ = self.store.place.objects[begin_name(id)]
        return frozenset(decode_begin(data, id, self.repo.id).bases)

    def places(self, id: CheckpointId, *paths: str) -> list[tuple[str, int, int]]:
        """Where the chunks of these leaves of a checkpoint lie, by default of all and what those are decoded from: the
        object, the first byte and their number."""
        manifest = self.repo.manifest(id)
        index = self.repo.index(manifest, 0)
        names = [f"{(pack.at or id).directory}/{pack.name}" for pack in index.packs]
        chunks = ChunkMap.of(index)
        rows = np.array([row for row, spec in enumerate(index.specs) if spec.path in paths], np.int64)
        found = chunks.chunks(rows) if paths else chunks.all_stored()
        return [
            (names[pack], offset, stored)
            for pack, offset, stored in zip(
                found.pack.tolist(), found.offset.tolist(), found.stored.tolist(), strict=True
            )
        ]

    def needs(self, id: CheckpointId) -> list[tuple[str, int, int]]:
        """What a checkpoint needs of data files, as `places` has it: all chunks, and the headers. Read once, when it
        has been saved: later it may lie in the trash, or have rotted."""
        if id not in self._needs:
            packs = self.repo.index(self.repo.manifest(id), 0).packs
            headers = [(f"{(pack.at or id).directory}/{pack.name}", 0, pack.header_length) for pack in packs]
            self._needs[id] = headers + self.places(id)
        return self._needs[id]

    def uses(self, id: CheckpointId, name: str, at: int) -> bool:
        """Whether a byte of a data file is one that the checkpoint needs."""
        return any(name == one and start <= at < start + length for one, start, length in self.needs(id))

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self.store.place.objects if name == prefix or name.startswith(f"{prefix}/"))

    def flip(self, name: str, at: int, bit: int) -> None:
        data, when = self.store.place.objects[name]
        changed = bytearray(data)
        changed[at % len(data)] ^= 1 << bit
        self.store.place.objects[name] = bytes(changed), when

    def copy(self, source: str, target: str) -> list[str]:
        """Copies a directory as a person would; the new names."""
        found = [(target + name[len(source) :], self.store.place.objects[name][0]) for name in self.names(source)]
        for name, data in found:
            self.store.place.objects[name] = data, self.store.place.tick()
        return [name for name, _ in found]


@contextmanager
def crashing(store: MortalStore, point: str | None) -> Iterator[None]:
    """Within the block the process with this store dies when it reaches this crash point."""
    if point is None:
        yield
        return
    with armed(point, store.die):
        yield


@contextmanager
def simulated_world(seed: int) -> Iterator[World]:
    """A new world in which no lease beats by itself, no wait takes time, and threads of the dead die quietly."""
    loud = threading.excepthook

    def hook(arguments: Any) -> None:
        if arguments.exc_type is not Gone:
            loud(arguments)

    with ExitStack() as stack:
        world = World()
        stack.enter_context(quiet(world.processes, seed))
        stack.enter_context(mock.patch.object(owner_watch, "Clock", lambda: Faster().clock()))
        stack.enter_context(replacing(now_text, world.wall_text))
        # Where the grace of what it has removed is over, it would empty the trash at a time that nobody can foresee.
        stack.enter_context(mock.patch.object(RetentionWorker, "_empty_trash", lambda self, attempt: 0))
        threading.excepthook = hook
        standing = dict(exit_status._ending.failures)
        try:
            yield world
        finally:
            threading.excepthook = loud
            exit_status._ending.failures = standing  # saves failed here on purpose
