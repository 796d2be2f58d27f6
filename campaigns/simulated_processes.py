"""Simulated processes: who owns what, and who is dead, as the recorded program sees it.

A recording is made in one real process, and judged in another. So the identity that claims and tombstones record, and
the verdict on whether such a process lives, are simulated; random names are drawn from a seed, so that a recording is
the same each time.
"""

from __future__ import annotations

import random
import secrets
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from tenuto.concurrency import process
from tenuto.model.records import Owner
from tenuto.repo import repository


class Processes:
    """Numbers of processes, each alive until it is killed; `current` is the one that acts now."""

    def __init__(self, first: int = 0) -> None:
        self.current = first
        self._last = first
        self._living: set[int] = set()

    def start(self) -> int:
        self._last += 1
        self._living.add(self._last)
        self.current = self._last
        return self._last

    def end(self, number: int) -> None:
        self._living.discard(number)

    def end_all(self) -> None:
        self._living.clear()

    def this_process(self) -> Owner:
        return Owner("simulated", "boot", "namespace", self.current, f"start-{self.current}", "user")

    def observe(self, owner: Owner, own: Owner) -> process.Observation:
        return process.Observation("alive" if owner.host == "simulated" and owner.pid in self._living else "dead")


def replacing(original: Callable[..., Any], replacement: Callable[..., Any]) -> ExitStack:
    """Replaces `original` under every name by which modules of Tenuto and of the campaigns know it."""
    stack = ExitStack()
    for name, module in list(sys.modules.items()):
        if name.startswith(("tenuto.", "campaigns.")):
            for key, value in list(vars(module).items()):
                if value is original:
                    stack.enter_context(mock.patch.object(module, key, replacement))
    return stack


@contextmanager
def simulated(processes: Processes, seed: int) -> Iterator[None]:
    """Within the block Tenuto takes `processes` for the processes there are, and draws names from `seed`."""
    source = random.Random(seed)
    with ExitStack() as stack:
        stack.enter_context(replacing(process.this_process, processes.this_process))
        stack.enter_context(replacing(process.observe, processes.observe))
        # What a process has found out about a place it does not ask again; each recording is of a new process.
        stack.enter_context(mock.patch.object(repository, "_deciding", set()))
        stack.enter_context(mock.patch.object(secrets, "token_hex", lambda count=32: source.randbytes(count).hex()))
        stack.enter_context(mock.patch.object(uuid, "uuid4", lambda: uuid.UUID(bytes=source.randbytes(16), version=4)))
        yield
