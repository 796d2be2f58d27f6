"""Coalesced reads cover every wanted byte once, in whole chunks, in bounded ranges."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.plan.reads import coalesce

CHUNK = 64


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 900), st.booleans()), max_size=40),
    st.sampled_from([64, 256, 1024]),
    st.sampled_from([0, 100, 10_000]),
)
def test_every_wanted_byte_is_read_once(leaves: list[tuple[int, bool]], task_bytes: int, gap: int) -> None:
    offsets, at = [], 4096
    for length, _ in leaves:
        offsets.append(at)
        at += length
    lengths = [length for length, _ in leaves]
    wants = [(place, leaf) for place, leaf in enumerate(leaf for leaf, (_, wanted) in enumerate(leaves) if wanted)]
    tasks = coalesce(wants, offsets, lengths, chunk_bytes=CHUNK, task_bytes=task_bytes, gap_bytes=gap)
    seen: dict[int, list[tuple[int, int]]] = {}
    for task in tasks:
        end = task.start
        for position, part in task.parts:
            assert position == offsets[part.leaf] + part.start
            assert task.start <= position and position + part.stop - part.start <= task.stop
            assert position >= end and position - end <= gap
            assert part.start % CHUNK == 0
            assert part.stop % CHUNK == 0 or part.stop == lengths[part.leaf]
            end = position + part.stop - part.start
            seen.setdefault(part.leaf, []).append((part.start, part.stop))
        assert task.nbytes <= max(task_bytes, CHUNK)
        assert end == task.stop
    for _, leaf in wants:
        pieces = sorted(seen.pop(leaf, []))
        assert [start for start, _ in pieces] == [0, *[stop for _, stop in pieces[:-1]]][: len(pieces)]
        assert (pieces[-1][1] if pieces else 0) == lengths[leaf]
    assert not seen


def test_a_gap_is_read_over_only_up_to_its_bound() -> None:
    offsets, lengths = [0, 1000], [64, 64]
    wants = [(0, 0), (1, 1)]
    assert len(coalesce(wants, offsets, lengths, chunk_bytes=64, gap_bytes=936)) == 1
    assert len(coalesce(wants, offsets, lengths, chunk_bytes=64, gap_bytes=935)) == 2
