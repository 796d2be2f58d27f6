"""Whom a start asks whether he lives, of those who have images in this node's shared memory."""

import sys

import pytest

from support.memory_training import live
from tenuto.engine.memory_tier import slot_file
from tenuto.engine.memory_tier.listing import dead_images, kept_by_others
from tenuto.engine.staging import arena, slots
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the memory tier lies in shared memory on Linux only")


@pytest.fixture
def asked(monkeypatch):
    found, inner = [], slot_file.holder
    monkeypatch.setattr(slot_file, "holder", lambda slot: found.append(slot) or inner(slot))
    return found


def test_a_start_asks_after_the_images_of_another_number_of_ranks_alone(tmp_path, root, asked):
    """Each question to one who lives takes a tenth of a second: the other ranks of a node and other jobs are many."""
    for name in ("ckpts", "elsewhere"):
        assert live(tmp_path / name, kill=2).killed
    repo = Repo.open(open_store(tmp_path / "ckpts"))
    assert kept_by_others(repo.id, "main", 1) == []
    assert asked == [], "they are those of one process, and so are these"
    found = kept_by_others(repo.id, "main", 2)
    assert [one.footer.where for one in found] == [str(tmp_path / "ckpts")] * 2
    assert asked == [one.slot for one in found]
    asked.clear()
    assert len(dead_images()) == len(asked) == 4


def test_what_is_not_sealed_is_nothing_to_go_on_from(tmp_path, root, asked):
    slot = slots.Slot(str(root), slot_file.parent("repo", "main"), slots.slot_name(0, 0))
    held = arena.table()
    held.take(slot)
    try:
        with open(held.create(slot), "wb"):
            assert kept_by_others("repo", "main", 2) == []
        assert asked == []
    finally:
        held.remove(slot)
        held.give_back(slot)
