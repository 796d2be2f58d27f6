"""What is lost with the image of a rank, as far as the last checkpoint of its line shows it."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from tenuto.maintenance.gather import Gathering, all_paths, entries, judge_loss
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Manifest
from tenuto.state.encode.flattener import Flattener


def tree_of(state: dict[str, Any]) -> Any:
    return Flattener(state).flatten().tree


def test_entries_are_what_ranks_may_have_or_not() -> None:
    rows, vector = np.zeros(3), np.zeros(2)
    tree = tree_of({"a": {"rows": rows, "count": 1}, "tied": rows, "history": [1, {"x": 2}], "vector": vector})
    assert sorted(entries(tree)) == ["a/count", "a/rows", "history", "tied", "vector"]
    assert all_paths(tree).issuperset(entries(tree))


def test_parameters_without_a_state_are_entries_of_an_optimizer() -> None:
    group = {"!": "dict", "i": [["lr", 0.1], ["params", ["a.weight", "b.weight"]]]}
    content = {"!": "dict", "i": [["state", {"!": "dict", "i": []}], ["param_groups", [group]]]}
    tree = {"!": "dict", "i": [["optimizer", {"!": "optimizer", "v": content}]]}
    found = {"optimizer/param_groups/0/params/a.weight", "optimizer/param_groups/0/params/b.weight"}
    assert found <= set(entries(tree)) and found <= all_paths(tree)


@pytest.mark.parametrize(("step", "alike"), [(0, []), (1, ["numpy"])])
def test_generators_are_alike_only_where_steps_have_shown_it(step: int, alike: list[str]) -> None:
    id = CheckpointId("main", 1, step)
    gathering = Gathering(CheckpointId("main", 1, 5), "", 2, id, (), {0: (0, "0of2-0")})
    tree, progress = tree_of({"history": [1]}), {"step": step, "ranks": 2, "alike": ["numpy", "python"]}
    base = Manifest(id, "", tree, (), hashlib.sha256().hexdigest(), 0, 0, 1 << 20, progress=progress)
    there = np.packbits(np.ones(len(entries(tree)), bool)).tobytes().hex()
    one = {"data": False, "entries": there, "why": ""}
    facts = [{**one, "marks": {"numpy": "1", "python": "2"}}, {**one, "marks": {"numpy": "1", "python": "3"}}]
    assert judge_loss(gathering, base, [None], facts) == ("", alike)
