"""Who may write a leaf: the probation, the rotating sample, demotion, and what updates wait for."""

from __future__ import annotations

import os
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.state import update_barrier
from tenuto.state.update_barrier import PROBATION, CaptureChoice, LeafHistory, Span

KIB = 1 << 10
sizes = st.lists(st.integers(1, 400).map(lambda count: count * KIB), min_size=1, max_size=12)


def leaves(found: list[int]) -> list[tuple[int, str, int]]:
    return [(number, f"model/{number}", size) for number, size in enumerate(found)]


def trusted(found: list[int]) -> LeafHistory:
    record = LeafHistory()
    for _ in range(PROBATION):
        record.passed(record.choose("f", leaves(found)))
    return record


def test_the_first_saves_of_a_structure_copy_everything_at_once_and_watch_it() -> None:
    record = LeafHistory()
    for _ in range(PROBATION):
        choice = record.choose("f", leaves([64 * KIB, 128 * KIB]))
        assert choice.probation and not choice.late
        assert choice.watched == [Span(0, 0, 64 * KIB), Span(1, 0, 128 * KIB)]
        record.passed(choice)
    assert record.choose("f", leaves([64 * KIB, 128 * KIB])).late


def test_a_save_that_was_not_compared_is_no_part_of_the_probation() -> None:
    record = LeafHistory()
    for _ in range(10):
        assert record.choose("f", leaves([64 * KIB])).probation
    record.passed(record.choose("f", []))  # nothing was owned: nothing was learned
    for _ in range(PROBATION):
        choice = record.choose("f", leaves([64 * KIB]))
        assert choice.probation
        record.passed(choice)
    assert not record.choose("f", leaves([64 * KIB])).probation


def test_another_structure_begins_anew() -> None:
    record = trusted([64 * KIB])
    assert record.choose("f", leaves([64 * KIB])).late
    assert record.choose("g", leaves([64 * KIB])).probation
    assert record.choose("f", leaves([64 * KIB])).probation


def test_a_leaf_that_becomes_another_in_size_is_looked_at_anew_with_its_structure() -> None:
    record, same = LeafHistory(), leaves([64 * KIB])
    for _ in range(PROBATION):
        record.passed(record.choose("f", same))
    assert record.choose("f", same).late
    same[0] = (0, "model/0", 128 * KIB)
    assert record.choose("g", same).watched == [Span(0, 0, 128 * KIB)]


def test_a_leaf_that_comes_later_has_a_probation_of_its_own() -> None:
    record, both = trusted([64 * KIB]), leaves([64 * KIB, 32 * KIB])
    for _ in range(PROBATION):
        choice = record.choose("f", both)
        assert choice.probation == ["model/1"] and Span(1, 0, 32 * KIB) in choice.watched
        assert {span.leaf for span in choice.late} == {0}, "the others need none any more"
        record.passed(record.choose("f", leaves([64 * KIB])))  # in between it was not owned
        record.passed(choice)
    choice = record.choose("f", both)
    assert not choice.probation and {span.leaf for span in choice.late} == {0, 1}


@given(sizes)
def test_after_the_probation_every_byte_is_late_or_watched_and_none_is_both(found: list[int]) -> None:
    record = trusted(found)
    for _ in range(5):
        choice = record.choose("f", leaves(found))
        for leaf, path, size in leaves(found):
            own = sorted((span.start, span.stop) for span in (*choice.late, *choice.watched) if span.leaf == leaf)
            if size < update_barrier.LEAST_BYTES:
                assert not own, f"{path} is cheaper copied at once"
            else:
                assert own[0][0] == 0 and own[-1][1] == size
                assert all(one[1] == other[0] for one, other in pairwise(own))
                assert all(start < stop and start % 4096 == 0 for start, stop in own)


@given(sizes)
def test_every_byte_gets_its_turn_in_the_sample(found: list[int]) -> None:
    record = trusted(found)
    fit = [(leaf, size) for leaf, _, size in leaves(found) if size >= update_barrier.LEAST_BYTES]
    total = sum(size for _, size in fit)
    seen: Counter[tuple[int, int]] = Counter()
    for _ in range(total // 4096 + 2):
        for span in record.choose("f", leaves(found)).watched:
            seen.update((span.leaf, page) for page in range(span.start // 4096, -(-span.stop // 4096)))
    assert {(leaf, page) for leaf, size in fit for page in range(-(-size // 4096))} <= seen.keys()


def test_the_sample_is_about_an_eight_hundredth() -> None:
    found = [1 << 20] * 50
    choice = trusted(found).choose("f", leaves(found))
    watched = sum(span.stop - span.start for span in choice.watched)
    assert 0.0011 < watched / sum(found) <= 1 / 800


def test_what_is_demoted_stays_eager_also_in_another_structure() -> None:
    record = trusted([64 * KIB, 64 * KIB])
    assert record.demote("model/0", "it was changed") and not record.demote("model/0", "again")
    for fingerprint in ("f", "g"):
        choice = record.choose(fingerprint, leaves([64 * KIB, 64 * KIB]))
        assert {span.leaf for span in (*choice.late, *choice.watched)} == {1}
    assert record.demoted == {"model/0": "it was changed"}


def test_where_nothing_is_owned_nothing_is_late() -> None:
    assert trusted([64 * KIB]).choose("f", []) == CaptureChoice()


class Waiting:
    def __init__(self) -> None:
        self.asked = 0

    def before_update(self) -> None:
        self.asked += 1
        update_barrier.lower_barrier(self)


def test_an_update_asks_every_barrier_that_stands() -> None:
    one, other = Waiting(), Waiting()
    update_barrier.raise_barrier(one)
    update_barrier.raise_barrier(other)
    update_barrier.let_updates_pass()
    update_barrier.let_updates_pass()
    assert (one.asked, other.asked) == (1, 1)
    update_barrier.lower_barrier(one)  # twice is no error


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_waits_for_nothing() -> None:
    one = Waiting()
    update_barrier.raise_barrier(one)
    try:
        child = os.fork()
        if child == 0:
            update_barrier.let_updates_pass()
            os._exit(one.asked)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        update_barrier.lower_barrier(one)
