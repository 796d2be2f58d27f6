"""A slice of the simulation of many ranks: what they write, read and tell each other, counted; no time is looked at."""

from __future__ import annotations

from typing import Any

import pytest

from campaigns.many_ranks.campaign import LEAVES, RANKS, campaign, growth, measure, mesh_of, meshes
from campaigns.many_ranks.states import ALIKE


@pytest.fixture(scope="module")
def sizes() -> list[dict[str, Any]]:
    """As many boxes on each of 32, 64 and 128 ranks."""
    return [measure(mesh_of(ranks, 12), look_at=3) for ranks in (32, 64, 128)]


def test_every_item_is_written_once_and_comes_back_on_half_the_ranks(sizes: list[dict[str, Any]]) -> None:
    for one, ranks in zip(sizes, (32, 64, 128), strict=True):
        assert one["boxes_written"] == 12 * ranks + ALIKE
        assert one["entries"] == (12 + ALIKE) * ranks
        assert one[f"restore_onto_{ranks // 2}_ranks"]["wrong"] == []


def test_replicas_are_written_once() -> None:
    found = measure(mesh_of(32, 6, columns=4, copies=2), look_at=2)
    assert found["boxes_written"] == 16 * 6 + ALIKE


def test_what_a_rank_is_told_does_not_grow_with_their_number(sizes: list[dict[str, Any]]) -> None:
    for name, phase in sizes[0]["phases"].items():
        for larger in sizes[1:]:
            assert larger["phases"][name].get("rank_board_bytes", 0) <= 1.1 * phase.get("rank_board_bytes", 0), name


def test_what_the_coordinator_is_told_grows_with_their_number_and_no_faster(sizes: list[dict[str, Any]]) -> None:
    for name, one in growth(sizes, (32, 64, 128)).items():
        if name.endswith("coordinator_board_bytes"):
            assert one["exponent"] <= 1.05, name


def test_a_rank_opens_only_the_indexes_of_those_that_hold_some_of_what_it_wants(sizes: list[dict[str, Any]]) -> None:
    for one in sizes:
        found = next(value for name, value in one.items() if name.startswith("restore"))
        assert 1 <= found["indexes_read"] <= found["boxes_that_overlap"] + ALIKE
    read = [next(value for name, value in one.items() if name.startswith("restore"))["read_bytes"] for one in sizes]
    assert read[-1]["indexes"] <= 1.2 * read[0]["indexes"]


def test_an_entry_of_the_tables_takes_less_than_100_bytes(sizes: list[dict[str, Any]]) -> None:
    """With the heads of as many indexes as there are ranks, over as few boxes as these have more: 62 boxes."""
    found = measure(mesh_of(32, 62), look_at=1)
    assert found["stored"]["index_and_boxes_bytes_per_shard"] <= 100


def test_the_campaign_tells_growth_over_ranks_and_leaves() -> None:
    said: list[str] = []
    found = campaign([16, 32], [3, 6], said.append)
    assert len(said) == 4 and len(found["sizes"]) == 4
    assert found["growth_in_ranks"]["first: plan, coordinator_board_bytes"]["exponent"] > 0.5
    assert found["growth_in_leaves"]["first: plan, coordinator_board_bytes"] > 0


def test_every_size_of_the_whole_campaign_makes_a_mesh() -> None:
    twice, over_ranks, over_leaves = meshes(RANKS, LEAVES)
    assert twice.copies == 2 and abs(twice.ranks - RANKS[0]) < 16
    assert [mesh.ranks for mesh in over_ranks] == list(RANKS)
    assert over_ranks[-1].entries >= 1_000_000 and over_leaves[-1].entries == 1_000_000
