"""Thousands of checkpoints in a run: what training and looking cost does not grow with their number."""

from __future__ import annotations

import secrets
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import tenuto
from benchmarks.grown_repository import grow
from tenuto import keep
from tenuto.cli.views.run_listing import listing
from tenuto.model.ids import CheckpointId
from tenuto.policy.keep import KeepPolicy
from tenuto.repo.catalog import RELISTED
from tenuto.repo.repository import Repo
from tenuto.store.contract import Bytes
from tenuto.store.memory import MemoryStore

FEW, MANY, MORE = 10, 300, 600
CALLS = ("put_if_absent", "get", "open", "stat", "children", "walk", "delete", "settle")


class Counting:
    """A store that counts the calls that it gets, of all threads; a walk as one for each object that it finds. Those
    for a lease are left out: they come as time passes."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.calls = 0
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name not in CALLS:
            return found

        def call(*args: Any, **named: Any) -> Any:
            result = found(*args, **named)
            if name == "walk":
                result = list(result)
            if args and "/lease" in str(args[0]):
                return result
            with self._lock:
                self.calls += 1 if name != "walk" else 1 + len(result)
            return iter(result) if name == "walk" else result

        return call

    def of(self, work: Callable[[], object]) -> int:
        """How many calls `work` makes."""
        before = self.calls
        work()
        return self.calls - before


class Run:
    """A run with `number` checkpoints by a process that has ended, and the next process that trains it."""

    def __init__(self, number: int, policy: KeepPolicy | None = None) -> None:
        self.store = Counting(MemoryStore(secrets.token_hex(8)))
        self.policy = policy or keep.all()
        self.state = {"w": np.zeros(4, np.float32)}
        with self.trained() as ckpt:
            for _ in ckpt.steps(1):
                pass
        token = secrets.token_hex(16)
        grow(
            Repo.open(self.store.inner),
            CheckpointId("main", 1, 1),
            range(2, number + 1),
            lambda name, data: self.store.inner.put_if_absent(name, Bytes(data), token=token),
        )

    def trained(self) -> tenuto.Checkpointer:
        return tenuto.Checkpointer(self.store, self.state, save=tenuto.every(steps=1), keep=self.policy)

    def costs(self) -> dict[str, int]:
        """Calls of the store by what they are for."""
        found = {}
        repository = tenuto.Repository(self.store)
        found["latest"] = self.store.of(repository.latest)
        found["find"] = self.store.of(lambda: repository.find(step=2))
        found["ls"] = self.store.of(lambda: listing(repository.repo, None, 5))
        ckpt = self.trained()
        loops = []
        found["claim"] = self.store.of(lambda: loops.append(ckpt.steps(10**6)))
        steps = loops[0]
        next(steps)

        def save() -> None:
            next(steps)
            ckpt.wait()

        save()
        save()
        found["save"] = self.store.of(save)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the open step is left incomplete
            found["close"] = self.store.of(ckpt.close)
        return found


def test_nothing_costs_more_calls_where_more_checkpoints_are_kept() -> None:
    few, many = Run(FEW).costs(), Run(MORE).costs()
    assert many == few
    assert min(number for what, number in few.items() if what != "close") > 0
    assert few["close"] == 0, "but for its lease"


def test_a_save_costs_no_more_where_a_policy_keeps_many() -> None:
    policy = keep.latest(2) | keep.every(steps=1)
    many, more = Run(MANY, policy).costs(), Run(MORE, policy).costs()
    assert more["save"] <= many["save"] <= 4 * RELISTED
