"""What a rank leaves over: found as the paths say, and laid beside what the others leave over."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.state.restore.match import Unmatched, unmatched, unmatched_by_all
from tenuto.state.tree import terminals

Tree = st.recursive(
    st.one_of(st.integers(0, 3), st.just({"!": "leaf", "n": 0})),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["a", "b", "ab", "a.b", "1"]), inner, max_size=4).map(
            lambda held: {"!": "dict", "i": [[key, child] for key, child in held.items()]}
        ),
    ),
    max_leaves=20,
)


def below(path: str, roots: list[str]) -> bool:
    return any(path == root or path.startswith(f"{root}/") for root in roots)


def named(one: Unmatched | None, packed: bytes | None = None) -> list[str]:
    return [] if one is None else one.named(one.untaken if packed is None else packed)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(Tree, st.data())
def test_what_lies_at_or_below_a_path_is_left_over_with_it(tree: Any, data: st.DataObject) -> None:
    tree = {"!": "dict", "i": [["root", tree], ["rooted", 1]]}
    paths = terminals(tree)
    prefixes = sorted({"/".join(path.split("/")[:depth]) for path in paths for depth in range(1, 5)})
    some = st.lists(st.sampled_from([*prefixes, "a", "root/nothing"]), max_size=4)
    over, aside, refused = data.draw(some), data.draw(some), data.draw(some)
    found = unmatched(tree, over, aside, lambda path: path not in refused)
    assert named(found) == [path for path in paths if below(path, over + aside) or path in refused]
    assert found is None or found.named(found.over) == [path for path in paths if below(path, over)]


def told(over: str, aside: str = "", *, tree: str = "abcd") -> bytes:
    node = {"!": "dict", "i": [[key, 1] for key in tree]}
    found = unmatched(node, list(over), list(aside), lambda path: True)
    return b"" if found is None else found.encode()


def test_what_all_leave_over_or_do_not_ask_for_is_left_by_all_where_one_names_it() -> None:
    def left(*said: bytes) -> list[str]:
        whole = unmatched({"!": "dict", "i": [[key, 1] for key in "abcd"]}, list("abcd"), [], lambda path: True)
        assert whole is not None
        return whole.named(unmatched_by_all(said))

    assert left(told("ab"), told("bc")) == ["b"]
    assert left(told("ab"), told("c", "bd")) == ["b"]
    assert left(told("", "ab"), told("", "ab")) == [], "what nobody asks for"
    assert left(told("ab"), told("")) == [], "who takes all"
    assert left(told("ab"), told("ab"), told("d")) == []
    assert left(told("b"), told("b", tree="badc")) == [], "other names for the same"
