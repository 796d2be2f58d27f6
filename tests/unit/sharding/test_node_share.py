"""What ranks of a node read for each other: every byte once, by one that wants it, in windows that never overlap."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.engine.read.node_share import SECTIONS, PackRanges, SharedBlocks, share_blocks
from tenuto.engine.read.peer_window import PAGE

BLOCK, SECTION = 3 * PAGE, 12 * PAGE
ranges = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 400), st.integers(0, 120)), max_size=12)


def asked(found: list[tuple[int, int, int]]) -> PackRanges:
    columns = np.array(found, np.int64).reshape(-1, 3) * np.array([7, 500, 500])
    return PackRanges(columns[:, 0], columns[:, 1], columns[:, 1] + columns[:, 2]).merged(gap=0)


def covered(pack: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    found = np.zeros((3, 400 * 500 + 120 * 500), np.int64)
    for one, begin, end in zip(pack.tolist(), low.tolist(), high.tolist(), strict=True):
        found[one // 7, begin:end] += 1
    return found


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(ranges, min_size=2, max_size=5))
def test_what_is_wanted_twice_is_in_one_block_of_one_who_wants_it(found: list[list[tuple[int, int, int]]]) -> None:
    said = [asked(one) for one in found]
    dealt = share_blocks(said, block_bytes=BLOCK, section_bytes=SECTION)
    wants = [covered(one.pack, one.low, one.high) for one in said]
    assert all(want.max(initial=0) <= 1 for want in wants)
    blocks = covered(dealt.pack, dealt.low, dealt.high)
    assert np.array_equal(blocks, (sum(wants) > 1).astype(np.int64))
    for pack, low, high, owner in zip(dealt.pack, dealt.low, dealt.high, dealt.owner, strict=True):
        assert high - low <= BLOCK and wants[owner][pack // 7, low:high].all()
    in_windows(dealt, len(said))


def in_windows(dealt: SharedBlocks, ranks: int) -> None:
    assert (np.diff(dealt.group) >= 0).all()
    for owner in range(ranks):
        lines = np.flatnonzero(dealt.owner == owner)
        assert dealt.window_bytes(owner) <= SECTIONS * SECTION
        for group in np.unique(dealt.group[lines]).tolist():
            # Those of one group and the ones that must still be there beside it.
            held = lines[(dealt.group[lines] <= group) & (dealt.group[lines] > group - SECTIONS)]
            begin, low, high = dealt.at[held], dealt.low[held] // PAGE * PAGE, -(-dealt.high[held] // PAGE) * PAGE
            order = np.argsort(begin)
            assert (begin[order][1:] >= (begin + high - low)[order][:-1]).all()


def test_blocks_are_dealt_out_evenly() -> None:
    everything = PackRanges(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([4000 * PAGE]))
    dealt = share_blocks([everything] * 4, block_bytes=BLOCK, section_bytes=SECTION)
    nbytes = [int((dealt.high - dealt.low)[dealt.owner == owner].sum()) for owner in range(4)]
    assert max(nbytes) - min(nbytes) <= BLOCK and sum(nbytes) == 4000 * PAGE
    assert dealt.groups >= 4000 // (4 * 12)


def test_the_step_of_a_range_is_the_group_of_the_last_block_before_its_end() -> None:
    pack, ends = np.array([0, 1]), np.array([40 * PAGE, 40 * PAGE])
    both = PackRanges(pack, np.zeros(2, np.int64), ends)
    dealt = share_blocks([both, both], block_bytes=BLOCK, section_bytes=SECTION)
    asked_of = np.array([0, 0, 0, 1, 2], np.int64)
    places = np.array([1, 9 * PAGE, 40 * PAGE, 1, 5], np.int64)
    step = dealt.group_of(asked_of, places).tolist()
    last = [
        int(dealt.group[(dealt.pack == one) & (dealt.low < at)][-1])
        for one, at in zip(asked_of[:4], places[:4], strict=True)
    ]
    assert step[:4] == last and step == sorted(step)
    assert step[4] == dealt.groups - 1


def test_ranges_are_joined_within_a_pack_alone() -> None:
    found = PackRanges(np.array([1, 0, 0, 0]), np.array([0, 20, 0, 8]), np.array([9, 30, 10, 12])).merged(gap=0)
    assert (found.pack.tolist(), found.low.tolist(), found.high.tolist()) == ([0, 0, 1], [0, 20, 0], [12, 30, 9])
