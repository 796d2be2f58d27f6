"""Leaves are found in the text of large trees too, where it is searched and not looked through bracket by bracket."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.errors import CorruptionError
from tenuto.model import canonical_json
from tenuto.repo.format.tree_scan import TreeText
from tenuto.state.tree import leaf_nodes

MANY = 200


def leaf(number: int) -> Any:
    return {"!": "leaf", "as": "numpy", "n": number}


def quick(tree: Any) -> TreeText:
    return TreeText(canonical_json.dumps(tree))


def dictionary(pairs: list[list[Any]]) -> Any:
    return {"!": "dict", "i": pairs}


def test_a_leaf_among_many() -> None:
    found = quick(dictionary([[f"k{number}", leaf(number)] for number in range(MANY)]))
    for number in (0, 1, 63, 64, 65, MANY - 1):
        assert found.find(f"k{number}") == leaf(number)
    for path in ("k", f"k{MANY}", "k1/k1", ""):
        assert found.find(path) is None


def test_a_path_with_nothing_after_its_last_stroke_is_no_leafs() -> None:
    """Reading the whole tree finds nothing there either."""
    node = dictionary([["a", leaf(3)], ["b", dictionary([["c", leaf(4)]])]])
    found = quick(node)
    assert (found.find("a"), found.find("b/c")) == (leaf(3), leaf(4))
    for path in ("a/", "b/c/", "b/", "/", "a//"):
        assert found.find(path) is None
        assert path not in dict(leaf_nodes(node))


def test_numbers_that_also_stand_deeper_or_in_a_text_are_told_apart() -> None:
    """The beginning of a pair may be met anywhere; only a bracket of the right depth begins one."""
    inner = dictionary([[5, leaf(1000)], ["note [5,", leaf(1001)]])
    found = quick(dictionary([[number, inner if number % 2 else leaf(number)] for number in range(MANY)]))
    assert found.find("#i:4") == leaf(4)
    assert found.find("#i:5") is None, "no leaf"
    for number in (1, 5, 7, MANY - 1):
        assert found.find(f"#i:{number}/#i:5") == leaf(1000)
        assert found.find(f"#i:{number}/note [5,") == leaf(1001)


def test_two_of_one_name_among_many_are_left_to_the_strict_way() -> None:
    pairs = [[f"k{number}", leaf(number)] for number in range(MANY)]
    found = quick(dictionary([*pairs, ["k7", leaf(7)]]))
    assert found.find("k7") is None
    assert found.find("k8") == leaf(8)


@pytest.mark.parametrize("count", [64, 65])
def test_few_and_many_pairs_are_searched_to_the_same_end(count: int) -> None:
    found = quick(dictionary([[f"k{number}", dictionary([["x", leaf(number)]])] for number in range(count)]))
    for number in range(count):
        assert found.find(f"k{number}/x") == leaf(number)


def test_a_text_is_found_in_a_larger_one() -> None:
    text = canonical_json.dumps(dictionary([["a", leaf(3)]]))
    inside = TreeText(b'{"before":[1],' + text + b"]}", 14, 14 + len(text))
    assert inside.find("a") == leaf(3)
    assert inside.text == text
    for start, stop in ((14, 14), (20, 14), (14, 13 + len(text)), (15, 14 + len(text))):
        with pytest.raises(ValueError):
            TreeText(b'{"before":[1],' + text + b"]}", start, stop)


def test_a_text_may_be_as_deep_as_a_tree_may_be() -> None:
    depth = canonical_json.MAX_DEPTH
    assert TreeText(b"[" * depth + b"]" * depth).find("a") is None
    with pytest.raises(CorruptionError) as caught:
        TreeText(b"[" * (depth + 1) + b"]" * (depth + 1))
    assert caught.value.message == f"the tree is nested deeper than {depth} levels"
