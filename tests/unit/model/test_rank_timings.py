"""Timings of many ranks: small in a manifest, and the slowest named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.model.timing import FULL, SLOWEST, RankTimings, Timing

DURATIONS = st.floats(0, 1000, allow_nan=False)


@given(st.lists(st.tuples(DURATIONS, DURATIONS), min_size=1, max_size=2 * FULL))
def test_what_a_manifest_says_is_read_back(values: list[tuple[float, float]]) -> None:
    timings = RankTimings.of([Timing(capture_s=one, write_s=other, bytes=7) for one, other in values])
    again = RankTimings.read(json.loads(json.dumps(timings.to_json())))
    assert again is not None and again.ranks == len(values)
    for name, part in timings.parts.items():
        read = again.parts[name]
        assert read.quantiles == pytest.approx(part.quantiles, abs=1e-6)
        assert len(read.slowest) == min(len(values), SLOWEST)
        assert (len(read.each) == len(values)) == (len(values) <= FULL)
    copied = timings.parts.get("capture_s")
    if copied is not None:
        rank, most = copied.slowest[0]
        assert most == max(one for one, _ in values) == values[rank][0]
        assert copied.least == min(one for one, _ in values)


def test_thousands_of_ranks_take_no_more_room_than_few() -> None:
    timings = RankTimings.of(
        [Timing(capture_s=rank * 0.001, write_s=1.0, cpu_s=0.5, bytes=1 << 30) for rank in range(4096)]
    )
    assert len(json.dumps(timings.to_json())) < 4000
    assert timings.parts["capture_s"].slowest[0] == (4095, 4.095)


@pytest.mark.parametrize(
    "told",
    [
        None,
        3,
        {"ranks": "x", "parts": {}},
        {"ranks": 2},
        {"ranks": 2, "parts": {"capture_s": [1]}},
        {"ranks": 2, "parts": {"capture_s": [1, -1], "write_s": {"quantiles": [1], "slowest": []}, "odd": [1, 2]}},
        {"ranks": 2, "parts": {"capture_s": {"quantiles": [1] * 5, "slowest": [[1, 2, 3]]}}},
    ],
    ids=str,
)
def test_what_makes_no_sense_is_passed_over(told: Any) -> None:
    found = RankTimings.read(told)
    assert found is None or not found.parts
