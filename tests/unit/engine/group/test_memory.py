"""What each of several ranks keeps in memory: all that it holds, read back into a state that holds the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.memory_training import shared_memory
from support.rank_threads import on_ranks, outcomes
from support.saves_of_ranks import held
from tenuto.engine.group.group import JobGroup
from tenuto.engine.memory_tier import slot_file
from tenuto.engine.memory_tier import tier as tiers
from tenuto.engine.memory_tier.cadence import MemorySaver
from tenuto.engine.memory_tier.common_states import StatesOfRanks
from tenuto.engine.memory_tier.eligibility import Candidate, EligibleImage
from tenuto.engine.memory_tier.image_store import Image
from tenuto.engine.memory_tier.matched_image import MatchedImage, match_image, share_buffers
from tenuto.engine.memory_tier.tier import MemoryTier
from tenuto.engine.read.choose import CheckpointLeaves
from tenuto.engine.save.job import ManifestDetails
from tenuto.engine.save.rank_group import SoloGroup
from tenuto.engine.staging import slots
from tenuto.errors import CorruptionError, ShardMismatch, StateMismatch
from tenuto.events import Emitter
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Manifest
from tenuto.ranks.agreement import Agreement
from tenuto.repo.ownership.claim import claim, joined
from tenuto.repo.repository import Repo
from tenuto.state.contract import Prepared
from tenuto.state.declarations import Shard, absent_layout, replicated_layout
from tenuto.state.encode.flattener import Flattener
from tenuto.state.restore.match import match_state
from tenuto.store.registry import open_store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the memory tier lies in shared memory on Linux only")

STEPS = 5


@pytest.fixture(autouse=True)
def root() -> Iterator[Path]:
    with shared_memory() as found:
        yield found


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    return Repo.create_or_open(open_store(tmp_path / "ckpts"))


State = Callable[[int, int, int], dict[str, Any]]
"""What a rank holds: by rank, number of ranks, and step."""


def flattened(rank: int, of: int, step: int, state: State = held) -> Any:
    return Flattener(state(rank, of, step), private={"mine": np.full(2, rank)}).flatten()


def keeping(repo: Repo, agreement: Agreement, steps: int = STEPS, state: State = held) -> MemoryTier:
    """A tier that has kept `steps` steps, as all ranks know."""
    rank, of = agreement.rank, agreement.world_size
    attempt = claim(repo, "main", None) if rank == 0 else None
    with agreement.round("claimed") as round:
        round.all_gather(b"", 30)
    record = repo.find_attempt("main", 1)
    assert record is not None
    attempt = attempt or joined(repo, record)
    tier = MemoryTier(repo, "main", group=JobGroup(agreement, "main", Emitter(), 30), emitter=Emitter())
    tier.claimed(attempt, flattened(rank, of, 0, state))
    tier.agree()
    saver = MemorySaver(tier, Emitter())
    for step in range(1, steps + 1):
        taken = flattened(rank, of, step, state)
        assert saver.save(taken, CheckpointId("main", 1, step), ManifestDetails(progress={"step": step}))
    assert saver.join(30)
    common = tier._common
    assert isinstance(common, StatesOfRanks) and common.step is not None and common.step.settle(30) == steps
    attempt.release()
    return tier


def leave(tier: MemoryTier, agreement: Agreement) -> None:
    with agreement.round("end") as round:
        round.all_gather(b"", 30)
    tier.close(None)


def opened(tier: MemoryTier, step: int) -> Image:
    slot, footer = next(one for one in tier.own_images() if one[1].id.step == step)
    return tier.open(Candidate(slot, footer, EligibleImage(None, durable=False)))


def test_each_rank_has_the_newest_two_and_all_have_one_save_id(repo: Repo) -> None:
    def work(agreement: Agreement) -> dict[int, tuple[str, int, int]]:
        tier = keeping(repo, agreement)
        assert tier.sealed is not None and tier.sealed.id.step == STEPS
        found = {footer.id.step: (footer.save_id, footer.rank, footer.ranks) for _, footer in tier.own_images()}
        leave(tier, agreement)
        return found

    found = on_ranks(3, work)
    for step in (STEPS - 1, STEPS):
        assert len({each[step][0] for each in found}) == 1
        assert [each[step][1:] for each in found] == [(rank, 3) for rank in range(3)]
    assert all(len(each) == 2 for each in found)


def matched(image: Image, target: dict[str, Any], private: dict[str, Any], *, verify: bool = True) -> MatchedImage:
    def match(manifest: Manifest, told: CheckpointLeaves) -> Prepared:
        return match_state(manifest.tree, told.private, told.specs, target, private_into=private, apart=True)

    found = match_image(image, match, verify=verify)
    assert len(found.manifest.indexes) == image.footer.ranks
    return found


def recalled(image: Image, target: dict[str, Any], private: dict[str, Any]) -> None:
    found = matched(image, target, private)
    found.read(image, Emitter())
    found.prepared.apply()


def test_a_rank_reads_back_what_it_holds_and_asks_no_other(repo: Repo) -> None:
    def work(agreement: Agreement) -> bool:
        rank, of = agreement.rank, agreement.world_size
        tier = keeping(repo, agreement)
        target, private, expected = held(rank, of, 0), {"mine": np.zeros(2, np.int64)}, held(rank, of, STEPS)
        image = opened(tier, STEPS)
        recalled(image, target, private)
        image.close()
        same = [np.array_equal(target["model"][name].value, expected["model"][name].value)
                for name in ("rows", "columns")]  # fmt: skip
        same.append(np.array_equal(target["model"]["bias"], expected["model"]["bias"]))
        same.append(np.array_equal(private["mine"], np.full(2, rank)))
        same.append(np.array_equal(target["seed"].value["order"], np.full(3, rank)))
        leave(tier, agreement)
        return all(same)

    assert on_ranks(3, work) == [True] * 3


def test_a_state_that_is_cut_otherwise_is_refused_untouched(repo: Repo) -> None:
    def work(agreement: Agreement) -> tuple[str, bool]:
        rank, of = agreement.rank, agreement.world_size
        tier = keeping(repo, agreement)
        target, before = held((rank + 1) % of, of, 0), held((rank + 1) % of, of, 0)
        image = opened(tier, STEPS)
        with pytest.raises(ShardMismatch) as raised:
            recalled(image, target, {"mine": np.zeros(2, np.int64)})
        image.close()
        leave(tier, agreement)
        return raised.value.message, np.array_equal(target["model"]["rows"].value, before["model"]["rows"].value)

    for message, untouched in on_ranks(2, work):
        assert "this rank holds another part of it" in message and untouched


def test_a_state_without_a_place_for_some_of_it_is_refused_untouched(repo: Repo) -> None:
    """An image has what its own rank held: what that leaves over is no other's, as it might be of a checkpoint."""

    def work(agreement: Agreement) -> tuple[str, bool]:
        rank, of = agreement.rank, agreement.world_size
        tier = keeping(repo, agreement)
        target, before = held(rank, of, 0), held(rank, of, 0)
        del target["model"]["bias"]
        image = opened(tier, STEPS)
        with pytest.raises(StateMismatch) as raised:
            recalled(image, target, {"mine": np.zeros(2, np.int64)})
        image.close()
        leave(tier, agreement)
        return raised.value.message, np.array_equal(target["model"]["rows"].value, before["model"]["rows"].value)

    for message, untouched in on_ranks(2, work):
        assert "model/bias: in the checkpoint only" in message and untouched


# -- what counts on one rank alone -------------------------------------------------------------------------------------


def averaged(rank: int, of: int, step: int) -> dict[str, Any]:
    """Of `mean` the value of rank 1 counts, and nobody's of `lost`."""
    mean, lost = np.full(4, 10.0 * step + rank), np.full(2, 1.0 * step)
    return {
        "w": np.arange(3.0) + step,
        "mean": Shard(mean, (replicated_layout if rank == 1 else absent_layout)(mean.shape)),
        "lost": Shard(lost, absent_layout(lost.shape)),
    }


def handed_on(
    repo: Repo, agreement: Agreement, entries: tuple[str, ...], meddle: Callable[[MemoryTier], None] | None = None
) -> tuple[dict[str, Any], int]:
    """What entries of the state are after the restart, with the bytes that have moved; raises what was in the way."""
    rank, of = agreement.rank, agreement.world_size
    tier = keeping(repo, agreement, state=lambda *which: {name: averaged(*which)[name] for name in entries})
    if meddle is not None and rank == 1:
        meddle(tier)
    target = {name: getattr(value, "value", value) for name, value in averaged(rank, of, 0).items() if name in entries}
    image = opened(tier, STEPS)
    try:
        found = matched(image, target, {"mine": np.zeros(2, np.int64)}, verify=meddle is None)
        round = partial(agreement.round, "memory")
        take = share_buffers(image, found, round, deadline_s=30, emitter=Emitter())
        try:
            take()
        except (CorruptionError, ShardMismatch):
            assert all(np.array_equal(target[name], averaged(rank, of, 0)[name].value) for name in entries[1:])
            raise
        moved = found.read(image, Emitter())
        found.prepared.apply()
    finally:
        image.close()
        leave(tier, agreement)
    return target, moved


def test_what_counts_on_one_rank_alone_comes_back_to_all(repo: Repo) -> None:
    found = on_ranks(3, lambda agreement: handed_on(repo, agreement, ("w", "mean")))
    for rank, (target, moved) in enumerate(found):
        assert np.array_equal(target["w"], np.arange(3.0) + STEPS), rank
        assert np.array_equal(target["mean"], np.full(4, 10.0 * STEPS + 1)), rank
        assert moved == 3 * 8 + 4 * 8 + 2 * 8, "w, mean, mine"


def test_what_counts_on_no_rank_is_in_no_image(repo: Repo) -> None:
    for one in outcomes(2, lambda agreement: handed_on(repo, agreement, ("w", "mean", "lost"))):
        assert isinstance(one, ShardMismatch) and "lost: no rank has all of it in memory" in one.message, one


def test_what_others_lack_is_verified_by_who_has_it(repo: Repo) -> None:
    def meddle(tier: MemoryTier) -> None:
        slot, footer = next(one for one in tier.own_images() if one[1].id.step == STEPS)
        image = opened(tier, STEPS)
        index = image.repo.index(image.manifest(), footer.rank)
        row = next(row for row, spec in enumerate(index.specs) if spec.path == "mean")
        assert slot.file.arena is not None
        slot.file.arena.buffer[int(index.offset[row])] ^= 0x10
        image.close()

    lacking, has = outcomes(2, lambda agreement: handed_on(repo, agreement, ("w", "mean"), meddle))
    assert isinstance(has, CorruptionError), has
    assert isinstance(lacking, ShardMismatch), lacking


def test_what_is_changed_by_a_bit_is_found_before_anything_is_filled(repo: Repo, root: Path) -> None:
    def work(agreement: Agreement) -> bool:
        rank, of = agreement.rank, agreement.world_size
        tier = keeping(repo, agreement)
        slot, footer = next(one for one in tier.own_images() if one[1].id.step == STEPS)
        assert slot.file.arena is not None
        slot.file.arena.buffer[footer.image // 2] ^= 0x10
        target, before = held(rank, of, 0), held(rank, of, 0)
        image = opened(tier, STEPS)
        with pytest.raises(CorruptionError):
            recalled(image, target, {"mine": np.zeros(2, np.int64)})
        image.close()
        leave(tier, agreement)
        return all(
            np.array_equal(target["model"][name].value, before["model"][name].value) for name in ("rows", "columns")
        )

    assert on_ranks(2, work) == [True, True]


def test_where_one_rank_has_no_slots_none_keeps_states(repo: Repo) -> None:
    from tenuto.engine.memory_tier.slot_file import take

    taken = take(repo.id, "main", 1, 0, of=2)

    def work(agreement: Agreement) -> str:
        rank, of = agreement.rank, agreement.world_size
        attempt = claim(repo, "main", None) if rank == 0 else None
        with agreement.round("claimed") as round:
            round.all_gather(b"", 30)
        told: list[str] = []
        tier = MemoryTier(
            repo, "main", group=JobGroup(agreement, "main", Emitter(), 30), emitter=Emitter(), warn=told.append
        )
        record = repo.find_attempt("main", 1)
        assert record is not None
        tier.claimed(attempt or joined(repo, record), flattened(rank, of, 0))
        tier.agree()
        assert not tier.on and tier.begin(flattened(rank, of, 1), writing=False) is None
        leave(tier, agreement)
        if attempt is not None:
            attempt.release()
        return "; ".join(told)

    try:
        told = on_ranks(2, work)
    finally:
        taken.leave()
    assert "rank 1 keeps none (its slots are taken" in told[0]
    assert told[1].startswith("states are not kept in memory: its slots are taken")
    assert list(slots.occupied(slots.SHARED_MEMORY)) == []


def test_an_owner_that_may_be_dying_is_waited_for_once(repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(tiers, "time", clock)
    taken = slot_file.take(repo.id, "main", 0, 0)
    try:
        tier = MemoryTier(repo, "main", group=SoloGroup(), emitter=Emitter())
        for _ in range(2):
            tier.await_slots()
            assert tier.blocked and 110 <= now[0] < 111
    finally:
        taken.leave()
