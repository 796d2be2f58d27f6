"""A store whose saves are held back, or fail, step by step, on command; it remembers in which order they committed."""

from __future__ import annotations

import re
import threading
from typing import Any

from tenuto.errors import StoreError
from tenuto.model.records import Receipt
from tenuto.store.contract import Content, Store
from tenuto.store.registry import open_store

STEPS = 50
PATIENCE_S = 60.0


class Held:
    """Packs of the steps in `hold` wait for `let_go`; each of `failures` strikes once, at its step's pack."""

    def __init__(self, inner: Store, *hold: int) -> None:
        self._inner = inner
        self._doors = {step: threading.Event() for step in range(STEPS)}
        self.reached = {step: threading.Event() for step in range(STEPS)}
        self.failures: dict[int, list[StoreError]] = {}
        self.put: list[tuple[int, str]] = []
        """Steps and file names, in the order in which they were there."""
        for step in range(STEPS):
            if step not in hold:
                self._doors[step].set()

    @property
    def committed(self) -> list[int]:
        return [step for step, name in self.put if name == "manifest.json"]

    def let_go(self, *steps: int) -> None:
        """Of these steps; of all, if none is named."""
        for step in steps or range(STEPS):
            self._doors[step].set()

    def await_pack(self, step: int) -> None:
        """Returns when the pack of `step` is about to be put."""
        assert self.reached[step].wait(PATIENCE_S)

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        found = re.search(r"/step-([0-9]+)/(.*)", name)
        step = int(found[1]) if found is not None else -1
        if name.endswith(".safetensors"):
            self.reached[step].set()
            assert self._doors[step].wait(PATIENCE_S)
            if self.failures.get(step):
                raise self.failures[step].pop(0)
        receipt = self._inner.put_if_absent(name, content, token=token)
        if found is not None:
            self.put.append((step, found[2]))
        return receipt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def held(where: Any, *hold: int) -> Held:
    return Held(open_store(where), *hold)
