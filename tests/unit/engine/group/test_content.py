"""The content digest of several ranks' checkpoints tells equal ones from unequal ones, whenever they were saved."""

from __future__ import annotations

from support.saves_of_ranks import save_jointly
from tenuto.maintenance import verify
from tenuto.repo.repository import Repo
from tenuto.store.memory import MemoryStore


def content(count: int, step: int, *, session: str = "") -> str:
    repo = Repo.create_or_open(MemoryStore("content"))
    (id,) = save_jointly(repo, count, (step,), session=session)
    assert not verify.execute(repo, verify.plan_verify(repo), threads=1, note=False).findings
    return repo.manifest(id).content


def test_equal_states_have_one_content_and_unequal_ones_another() -> None:
    assert content(3, 1, session="a" * 32) == content(3, 1, session="b" * 32)
    assert content(3, 1) != content(3, 2)
    assert content(3, 1) != content(2, 1)  # cut otherwise
