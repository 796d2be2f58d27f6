"""Memory that is taken before a save for an image whose leaves are not known yet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tenuto.engine.save.job import ManifestDetails
from tenuto.engine.save.saver import Saver
from tenuto.engine.staging import arena
from tenuto.repo.ownership.claim import claim
from tenuto.repo.repository import Repo
from tenuto.state.encode.flattener import Flattener
from tenuto.store.memory import MemoryStore

NBYTES = 3 << 20


@pytest.fixture
def saver(request: pytest.FixtureRequest) -> Any:
    repo = Repo.create_or_open(MemoryStore(f"expecting {request.node.name}"))
    attempt = claim(repo, "main", None)
    saver = Saver(repo, "main", lasting=True, in_flight=2)
    saver.attempt = attempt
    yield saver
    saver.close()
    attempt.release()


def save(saver: Saver, step: int) -> None:
    flattened = Flattener({"weights": np.full(NBYTES, step, np.uint8)}).flatten()
    saver.save(flattened, step, wait=True, about=ManifestDetails(progress={}, environment={}))


@pytest.mark.parametrize(("expected", "again"), [(NBYTES + (1 << 20), 0), (NBYTES // 2, 1)])
def test_the_first_save_takes_no_memory_where_enough_is_there(
    saver: Saver, expected: int, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[float] = []
    touch = arena._touch

    def counting(memory: Any) -> float:
        touched.append(len(memory))
        return touch(memory)

    monkeypatch.setattr(arena, "_touch", counting)
    saver.expect(expected)
    assert touched == [-(-expected // 4096) * 4096] * 2
    save(saver, 1)
    assert len(touched) == 2 + again
    saver.expect(expected)
    save(saver, 2)
    assert len(touched) == 2 + again
