"""A tier that does not answer holds up no command: it is asked with a deadline, and named."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.said import said
from tenuto import Tier, Tiers, every
from tenuto.repo.replicated import members
from tenuto.store.registry import open_store
from tenuto.store.wrappers.delegating import DelegatingStore


class Hung(DelegatingStore):
    answers: threading.Event

    def get(self, name: str, *, limit: int) -> bytes:
        self.answers.wait(60)
        return super().get(name, limit=limit)


@pytest.fixture
def fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A primary whose other tier, `slow` beside it, hangs."""
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    state = {"w": np.zeros(100)}
    with tenuto.Checkpointer(Tiers(Tier(fast), Tier(slow)), state, save=every(steps=1)) as ckpt:
        for _ in ckpt.steps(3):
            pass
    hung = Hung(open_store(slow))
    hung.answers = threading.Event()
    monkeypatch.setattr(members, "open_store", lambda url: hung)
    monkeypatch.setattr(members, "ANSWER_S", 0.2)
    yield fast
    hung.answers.set()


@pytest.mark.parametrize("command", ["ls", "show", "status", "verify"])
def test_a_command_leaves_it_out_and_says_so_in_one_line(cli: Any, fast: Path, command: str) -> None:
    status, out, err = cli(command, fast)
    assert status == 0 and "3" in out
    named = [line for line in err.splitlines() if "slow" in line]
    assert len(named) == 1 and "is left out, and what only it has is not found" in named[0], err


def test_a_load_leaves_it_out_and_says_so(fast: Path) -> None:
    with said("slow is left out, and what only it has is not found"):
        assert tenuto.load(fast).checkpoint.step == 3
