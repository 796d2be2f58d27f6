"""The stores that are damaged: small, each of another shape, and for each a twin with other bytes under equal names.

A twin gives what lies "under the right name" of another repository. Names, ids and times are drawn from a seed, so
that a campaign meets the same bytes however many processes it runs in.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

from campaigns.recorded_jobs import Faster, quiet, save_stages
from campaigns.simulated_processes import Processes, replacing
from tenuto.codec import choosing
from tenuto.engine.read.choose import CheckpointLeaves, restore_checkpoint
from tenuto.engine.save import rounded_copies
from tenuto.engine.save.job import Job
from tenuto.maintenance import gc, remove
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Manifest
from tenuto.policy import keep
from tenuto.policy.encoding import Encoding
from tenuto.policy.save import every
from tenuto.repo import repository
from tenuto.repo.lineage import latest, walk
from tenuto.repo.notes import add_note
from tenuto.repo.ownership.claim import Attempt, claim
from tenuto.repo.ownership.owner_watch import OwnerWatch
from tenuto.repo.refs import put_ref
from tenuto.repo.repository import Repo
from tenuto.repo.tombstones import put_tombstone
from tenuto.repo.unfinished import abort, free
from tenuto.state.contract import Prepared
from tenuto.state.restore.match import match_state
from tenuto.store.memory import MemoryStore, SharedObjects
from tenuto.training.checkpointer import Checkpointer

_names = itertools.count()


@dataclass(frozen=True)
class Shape:
    """One store and what was saved into it. `saved`: what each checkpoint must give back; `line`: each run's walk."""

    name: str
    store: MemoryStore
    repo: Repo
    saved: Mapping[CheckpointId, Any]
    line: Mapping[str, tuple[CheckpointId, ...]]
    objects: Mapping[str, bytes]
    """The untouched bytes by name."""
    twin: Mapping[str, bytes] = field(default_factory=dict)
    resting: Mapping[CheckpointId, tuple[CheckpointId, ...]] = field(default_factory=dict)
    """For each checkpoint those that name packs in its directory."""

    @property
    def place(self) -> SharedObjects:
        return self.store.place

    def heal(self) -> None:
        """Puts every object back as it was."""
        self.place.objects.clear()
        self.place.objects.update((name, (data, 1)) for name, data in self.objects.items())


def match_private(manifest: Manifest, leaves: CheckpointLeaves) -> tuple[Prepared, dict[str, Any]]:
    """Everything that a checkpoint holds, made anew; what belongs to one process alone goes into the mapping."""
    own: dict[str, Any] = {}
    if leaves.private is not None:
        own = {"data": {}, "random": {}}
    return match_state(manifest.tree, leaves.private, leaves.specs, private_into=own or None), own


class Builder:
    """One store being filled, by processes that end before it is damaged."""

    def __init__(self, seed: int, chunk_bytes: int) -> None:
        self.seed = seed
        self.source = random.Random(f"shape {seed}")
        self.numbers = np.random.default_rng(seed)
        self.store = MemoryStore(f"corruption-{os.getpid()}-{next(_names)}")
        self.repo = Repo.create_or_open(self.store, chunk_bytes=chunk_bytes)
        self.saved: dict[CheckpointId, Any] = {}

    def claim(self, run: str, parent: CheckpointId | None = None) -> Attempt:
        return claim(self.repo, run, parent, wait_s=0.0, observe=OwnerWatch(self.repo, run, clock=Faster().clock()))

    def save(self, attempt: Attempt, step: int, state: dict[str, Any]) -> CheckpointId:
        token = self.source.randbytes(16).hex()
        *_, id = save_stages(self.repo, attempt, CheckpointId(attempt.run, attempt.number, step), state, token)
        self.saved[id] = state
        return id

    def leave(self, attempt: Attempt, step: int, state: dict[str, Any], *, stages: int, close: bool) -> CheckpointId:
        """A save that never commits."""
        token = self.source.randbytes(16).hex()
        id = CheckpointId(attempt.run, attempt.number, step)
        for _ in itertools.islice(save_stages(self.repo, attempt, id, state, token), stages):
            pass
        if close:
            abort(self.repo, id, token)
            free(self.repo, id)
        return id


def _two_leaves(build: Builder) -> dict[str, Any]:
    return {"weights": build.numbers.random(40, np.float32), "bias": build.numbers.random(5), "step": 7}


def _steps(build: Builder) -> None:
    """Two attempts, a fork; notes, refs, a removed checkpoint that gc has marked, an aborted save, a dead remover."""
    first = build.claim("main")
    ten = build.save(first, 10, _two_leaves(build))
    gone = build.save(first, 15, _two_leaves(build))
    build.leave(first, 17, _two_leaves(build), stages=2, close=True)
    twenty = build.save(first, 20, _two_leaves(build))
    first.release()
    second = build.claim("main", twenty)
    thirty = build.save(second, 30, _two_leaves(build))
    build.save(second, 40, _two_leaves(build))
    add_note(build.repo, twenty, "metric", {"loss": 1.5})
    add_note(build.repo, twenty, "metric", {"loss": 1.25})
    add_note(build.repo, thirty, "verified", {"every_byte": True})
    put_ref(build.repo, "pin", "keep", ten)
    put_ref(build.repo, "pin", "keep", twenty)
    put_ref(build.repo, "tag", "best", thirty)
    second.release()
    remove.execute(build.repo, remove.plan_remove(build.repo, [gone], finished={}))
    del build.saved[gone]
    gc.execute(build.repo, gc.plan_gc(build.repo))
    side = build.claim("side", ten)
    build.save(side, 12, _two_leaves(build))
    side.release()
    put_tombstone(build.repo, ten, reason="rm")


def _chunks(build: Builder) -> None:
    """Leaves of many chunks, every width of item, empty ones and scalars, nested plain values; a save in flight."""
    attempt = build.claim("main")
    for step in (1, 2, 3):
        state = {
            "layers": [
                {"weight": build.numbers.random((48, 24), np.float32), "bias": build.numbers.random(24)},
                {"weight": build.numbers.integers(0, 200, (31, 7), np.uint8), "bias": np.zeros((0, 3), np.float16)},
            ],
            "moments": {"exp": build.numbers.random(700), "count": np.array(step, np.int64)},
            "flags": build.numbers.random(33) < 0.5,
            "halves": build.numbers.random((5, 5, 3)).astype(np.float16),
            "plain": {"rate": 0.1 * step, "name": "cosine", "none": None, "betas": (0.9, 0.999), 3: [True, 2**70]},
        }
        build.save(attempt, step, state)
    build.leave(attempt, 4, _two_leaves(build), stages=2, close=False)
    attempt.release()


def _many(build: Builder) -> None:
    """Many small leaves, two runs of equal structure."""
    for run in ("main", "other"):
        attempt = build.claim(run)
        for step in (5, 6):
            state = {f"block.{number}": build.numbers.random(number + 1, np.float32) for number in range(24)}
            build.save(attempt, step, state)
        attempt.release()


def _loader(build: Builder) -> None:
    """A training with epochs: data positions and random states are values of this process alone, metrics are logged."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    np.random.seed(build.seed)
    random.seed(build.seed)
    weights = build.numbers.random(300, np.float32)
    state: dict[str, Any] = {"weights": weights, "count": 0}
    try:
        policy = every(steps=3)
        with Checkpointer(build.store, state, data=[1.0, 2.0, 3.0, 4.0], save=policy, keep=keep.latest(9)) as ckpt:
            for _ in ckpt.epochs(2):
                for batch in ckpt.batches:
                    ckpt.wait()  # retention has a thread of its own, which draws ids too: the order must be one
                    weights += np.float32(batch * np.random.random())
                    state["count"] += 1
                    ckpt.log(loss=float(weights[0]))
                    if (ckpt.step + 1) % 3 == 0:
                        id = CheckpointId("main", 1, ckpt.step + 1)
                        build.saved[id] = {"weights": weights.copy(), "count": state["count"]}
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
    build.saved = {id: value for id, value in build.saved.items() if build.repo.exists(id)}


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Random generators of this process, whose states are saved too, from a seed."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    np.random.seed(seed)
    random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def _encoded(build: Builder) -> None:
    """Chains of differences, chunks that are named elsewhere, compressed, stored as they are, or rounded from others,
    by two attempts."""
    state: dict[str, Any] = {
        "weights": build.numbers.standard_normal(400, np.float32),
        "frozen": build.numbers.random(300, np.float32),
        "bytes": build.numbers.integers(0, 256, 700, np.uint8),
        "zeros": np.zeros(200),
        "step": 0,
    }
    state["half"] = state["weights"].astype(np.float16)
    # Chunks of this size would be stored as they are: what is attacked here is what is made of larger ones.
    with (
        _seeded(build.seed),
        mock.patch.object(choosing, "SMALLEST_BYTES", 0),
        mock.patch.object(rounded_copies, "SMALLEST_BYTES", 0),
    ):
        for attempt, steps in ((1, range(1, 5)), (2, range(5, 7))):
            with Checkpointer(
                build.store, state, save=every(steps=1), keep=keep.all(), encoding=Encoding(delta=8)
            ) as ckpt:
                for step in ckpt.steps(steps[-1]):
                    ckpt.wait()
                    state["weights"] *= np.float32(1.0001)
                    state["half"][:] = state["weights"]
                    state["bytes"][step * 50] ^= 1
                    state["step"] = step + 1
                    copied = {
                        name: value.copy() if isinstance(value, np.ndarray) else value for name, value in state.items()
                    }
                    build.saved[CheckpointId("main", attempt, step + 1)] = copied


SHAPES: Mapping[str, tuple[int, Callable[[Builder], None]]] = {
    "steps": (1 << 18, _steps),
    "chunks": (256, _chunks),
    "many": (1 << 18, _many),
    "loader": (512, _loader),
    "encoded": (256, _encoded),
}
"""Name to chunk size in bytes and what fills the store."""


def build_shape(name: str, seed: int) -> Shape:
    """The shape with its twin, both filled by simulated processes that have ended."""
    ours, theirs = _filled(name, seed), _filled(name, seed + 1000)
    saved = dict(ours.saved)
    for id, state in ours.saved.items():
        saved[id] = (state, _private_of(ours.repo, id))
    line = {run: tuple(walk(ours.repo, run)) for run in ours.repo.runs()}
    assert all(latest(ours.repo, run) in saved for run in line)
    objects = {name: data for name, (data, _) in ours.store.place.objects.items()}
    twin = {name: data for name, (data, _) in theirs.store.place.objects.items()}
    resting: dict[CheckpointId, tuple[CheckpointId, ...]] = {}
    for id in sorted(saved):
        for base in ours.repo.manifest(id).bases:
            resting[base] = (*resting.get(base, ()), id)
    return Shape(name, ours.store, ours.repo, saved, line, objects, twin, resting)


def _filled(name: str, seed: int) -> Builder:
    chunk_bytes, fill = SHAPES[name]
    with repeatable(seed):
        build = Builder(seed, chunk_bytes)
        fill(build)
    return build


@contextmanager
def repeatable(seed: int) -> Iterator[None]:
    """Ids from a seed, no wall clock, simulated processes, leases that do not beat by themselves."""
    processes = Processes()
    processes.start()
    with ExitStack() as stack:
        stack.enter_context(quiet(processes, seed))
        stack.enter_context(mock.patch.object(Job, "timed", lambda job: job.about))  # times differ each time
        stack.enter_context(replacing(repository.now_text, lambda: f"2026-01-01T00:00:{seed % 60:02d}Z"))
        yield
    processes.end_all()


def _private_of(repo: Repo, id: CheckpointId) -> Any:
    """What of a checkpoint belongs to one process alone, as an untouched store gives it back."""
    found: list[dict[str, Any]] = []

    def match(manifest: Manifest, leaves: CheckpointLeaves) -> Prepared:
        prepared, own = match_private(manifest, leaves)
        found.append(own)
        return prepared

    restore_checkpoint(repo, id, match)
    return found[-1]
