"""Coalesced reads cover every wanted byte once, in whole chunks, in bounded ranges."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.codec.chunk_map import ChunkMap, Column
from tenuto.sharding import coalesce as coalescing
from tenuto.sharding.coalesce import ReadPlan, coalesce, cut

CHUNK = 64


def planned(offsets: list[int], lengths: list[int], wanted: list[int], **how: Any) -> ReadPlan:
    """`wanted` are leaf numbers, in the order in which they are asked for; digests are numbered leaf after leaf."""
    length = np.array(lengths, np.int64)
    starts = np.cumsum(np.append(0, -(-length // CHUNK)))
    leaf = np.array(wanted, np.int64)
    return coalesce(chunk_map(np.array(offsets, np.int64), length, starts).chunks(leaf), **how)


def chunk_map(offset: Column, length: Column, first: Column) -> ChunkMap:
    """Of rows in one pack."""
    return ChunkMap(np.zeros(len(offset), np.int64), offset, length, first, np.empty((0, 16), np.uint8), CHUNK)


def columns(plan: ReadPlan, number: int) -> tuple[int, ...]:
    chunks = plan.chunks
    return tuple(int(column[number]) for column in (chunks.want, chunks.start, chunks.size, chunks.offset))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 900), st.booleans()), max_size=40),
    st.sampled_from([64, 256, 1024]),
    st.sampled_from([0, 100, 10_000]),
    st.randoms(use_true_random=False),
)
def test_every_wanted_byte_is_read_once(leaves: list[tuple[int, bool]], task_bytes: int, gap: int, random: Any) -> None:
    offsets, at = [], 4096
    for length, _ in leaves:
        offsets.append(at)
        at += length
    lengths = [length for length, _ in leaves]
    wanted = [leaf for leaf, (_, taken) in enumerate(leaves) if taken]
    random.shuffle(wanted)
    plan = planned(offsets, lengths, wanted, task_bytes=task_bytes, gap_bytes=gap)
    first_row = [sum(-(-one // CHUNK) for one in lengths[:leaf]) for leaf in range(len(leaves))]
    seen: dict[int, list[tuple[int, int]]] = {}
    runs = 0
    for task in plan.tasks:
        end = task.start
        assert task.first == runs and task.last > task.first
        runs = task.last
        chunks = range(plan.runs[task.first], plan.runs[task.last])
        pieces: dict[int, int] = {}
        for number in chunks:
            want, start, size, position = columns(plan, number)
            leaf = wanted[want]
            assert position == offsets[leaf] + start and start % CHUNK == 0
            assert size == min(CHUNK, lengths[leaf] - start)
            assert plan.chunks.digest[number] == first_row[leaf] + start // CHUNK
            assert position >= end and position - end <= gap
            end = position + size
            seen.setdefault(leaf, []).append((start, start + size))
            pieces[leaf] = pieces.get(leaf, 0) + size
        assert end == task.stop and task.nbytes == sum(pieces.values()) and task.shortest == min(pieces.values())
        assert task.stop - task.start <= max(task_bytes, CHUNK)
    assert runs == len(plan.runs) - 1 and plan.runs[-1] == len(plan.chunks)
    for leaf in wanted:
        found = sorted(seen.pop(leaf, []))
        assert [start for start, _ in found] == [0, *[stop for _, stop in found[:-1]]][: len(found)]
        assert (found[-1][1] if found else 0) == lengths[leaf]
    assert not seen


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from([0, 10, 63, 64, 65, 1000, 20_000]), st.booleans()), max_size=40))
def test_a_run_is_one_leaf_or_several_small_ones_without_a_hole(leaves: list[tuple[int, bool]]) -> None:
    lengths = [length for length, _ in leaves]
    offsets = np.cumsum([0, *lengths]).tolist()[:-1]
    wanted = [leaf for leaf, (_, taken) in enumerate(leaves) if taken]
    plan = planned(offsets, lengths, wanted, task_bytes=1 << 20)
    for first, last in pairwise(plan.runs):
        position, size = plan.chunks.offset[first:last], plan.chunks.stored[first:last]
        assert (position[1:] == (position + size)[:-1]).all()
        inside = {int(want) for want in plan.chunks.want[first:last]}
        assert len(inside) == 1 or all(lengths[wanted[want]] < coalescing.SMALL_BYTES for want in inside)
        assert int(size.sum()) <= coalescing.RUN_BYTES + max(coalescing.SMALL_BYTES, CHUNK)


def test_small_leaves_in_a_row_are_one_run() -> None:
    plan = planned([0, 10, 20, 30], [10, 10, 10, 10], [3, 0, 1, 2])
    assert list(plan.runs) == [0, 4] and plan.chunks.want.tolist() == [1, 2, 3, 0]


def test_a_gap_is_read_over_only_up_to_its_bound() -> None:
    offsets, lengths = [0, 1000], [64, 64]
    assert len(planned(offsets, lengths, [0, 1], gap_bytes=936).tasks) == 1
    assert len(planned(offsets, lengths, [0, 1], gap_bytes=935).tasks) == 2


def test_nothing_wanted_is_nothing_read() -> None:
    for wanted in ([], [0]):
        plan = planned([0], [0], wanted)
        assert not plan.tasks and list(plan.runs) == [0]


def test_pieces_of_each_row() -> None:
    row, start = cut(np.array([0, 5, 4, 9], np.int64), 4)
    assert row.tolist() == [1, 1, 2, 3, 3, 3] and start.tolist() == [0, 4, 0, 0, 4, 8]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2000)), min_size=1, max_size=12),
    st.sampled_from([64, 256, 1024]),
    st.sampled_from([0, 100, 10_000]),
)
def test_wanted_ranges_may_lie_in_each_other(ranges: list[tuple[int, int]], task_bytes: int, gap: int) -> None:
    """One leaf is wanted whole and in part where it was tied when saved and is not in the target."""
    offset, length = (np.array(column, np.int64) for column in zip(*ranges, strict=True))
    offset = 4096 + offset * CHUNK
    plan = coalesce(chunk_map(offset, length, offset // CHUNK).chunks(), task_bytes=task_bytes, gap_bytes=gap)
    seen: dict[int, list[tuple[int, int]]] = {}
    for task in plan.tasks:
        wanted = np.zeros(task.stop - task.start, bool)
        for number in range(plan.runs[task.first], plan.runs[task.last]):
            want, start, size, position = columns(plan, number)
            assert position == offset[want] + start and plan.chunks.digest[number] == position // CHUNK
            assert task.start <= position and position + size <= task.stop
            wanted[position - task.start : position - task.start + size] = True
            seen.setdefault(want, []).append((start, start + size))
        assert wanted[0] and wanted[-1] and task.stop - task.start <= task_bytes
    for want, nbytes in enumerate(length.tolist()):
        ends = [0, *(stop for _, stop in sorted(seen.get(want, [])))]
        assert [start for start, _ in sorted(seen.get(want, []))] == ends[:-1] and ends[-1] == nbytes
