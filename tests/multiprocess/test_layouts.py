"""A slice of the campaign of layouts: what is saved in one comes back in any other, bit for bit, and back again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from campaigns.layouts import campaign, simulated
from campaigns.layouts.bugs import BUGS, BY_NAME
from campaigns.layouts.truth import Leaf, differences, of_leaf

SEED = 11


def test_pairs_of_layouts_over_processes(tmp_path: Path) -> None:
    *_, tally = campaign.over_processes(1, SEED, tmp_path)
    assert tally.faults == []
    assert (tally.pairs, tally.round_trips, tally.read_alone) == (1, 1, 3)
    assert tally.restores > 1


def test_pairs_of_layouts_over_simulated_ranks() -> None:
    *_, tally = campaign.over_threads(4, SEED, worlds=(1, 2, 3, 5))
    assert tally.faults == []
    assert (tally.pairs, tally.round_trips, tally.read_alone) == (4, 4, 12)


@pytest.mark.parametrize(
    "name", ["read one further", "fused in another order", "the first one's own", "leaves by order"]
)
def test_a_seeded_bug_is_caught(name: str) -> None:
    found = campaign.hunt_in_threads(BY_NAME[name], SEED)
    assert found.caught and found.how


def test_without_a_bug_nothing_is_caught() -> None:
    pair = next(iter(campaign.pairs(SEED, processes=False, worlds=(3,))))
    assert campaign.thread_pair(pair, campaign.Tally()) == []
    assert len(BY_NAME) == len(BUGS) >= 16


def test_what_is_compared_is_every_bit() -> None:
    leaf = Leaf("w", "float32", (3, 2))
    whole = of_leaf(1, leaf)
    assert differences({"w": whole}, {"w": whole.clone()}) == []
    changed = whole.clone()
    changed.view(torch.int32)[2, 1] ^= 1
    assert differences({"w": changed}, {"w": whole}) == ["w has other bits"]
    assert differences({"w": whole.reshape(2, 3)}, {"w": whole}) != []
    assert differences({"w": whole.view(torch.int32)}, {"w": whole}) != []
    assert differences({}, {"w": whole}) == ["w is missing"]
    assert differences({"w": whole, "x": whole}, {"w": whole}) == ["x is not wanted"]
    assert differences({"n": torch.tensor([float("nan")])}, {"n": -torch.tensor([float("nan")])}) != []


def test_every_simulated_world_is_drawn_from_small_and_large_ones() -> None:
    assert {1, 64} <= set(simulated.WORLDS)
