"""Each rank is told who shares its node, and nothing of others."""

from __future__ import annotations

import json
from typing import Any

from tenuto.engine.read import node_share
from tenuto.engine.read.node_share import MOST_RANKS


def said(memory: str, host: str, pid: int) -> list[Any]:
    return [memory, host, "boot", "pids", pid, "1", "me"]


def peers_of_each(facts: list[list[Any]]) -> list[Any]:
    return [json.loads(one) for one in node_share.peers_of_each(facts)]


def test_each_hears_of_its_own_node_alone() -> None:
    found = peers_of_each([said("m", "a", 1), said("m", "b", 2), said("m", "a", 3), said("m", "c", 4)])
    here = [[0, ["a", "boot", "pids", 1, "1", "me"]], [2, ["a", "boot", "pids", 3, "1", "me"]]]
    assert found == [here, [], here, []]


def test_other_memory_on_the_same_host_is_another_node() -> None:
    assert peers_of_each([said("m", "a", 1), said("n", "a", 2)]) == [[], []]


def test_nobody_reads_together_without_shared_memory() -> None:
    assert peers_of_each([said("", "a", 1), said("", "a", 2)]) == [[], []]


def test_more_than_one_number_can_name_read_for_themselves() -> None:
    many = [said("m", "a", pid) for pid in range(MOST_RANKS + 1)]
    assert peers_of_each(many[:-1])[0] and peers_of_each(many) == [[]] * len(many)
