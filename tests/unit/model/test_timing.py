"""Where a save's time went, as a value."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.model.timing import Timing

SECONDS = [field.name for field in fields(Timing) if field.name != "bytes"]

durations = st.floats(0, 1e6)
timings = st.builds(Timing, **dict.fromkeys(SECONDS, durations), bytes=st.integers(0, 1 << 50))
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*SECONDS, "bytes"]), inner),
    max_leaves=10,
)


def test_training_is_held_by_what_its_thread_does_and_by_nothing_else() -> None:
    held = {"look_s": 1.0, "wait_s": 2.0, "prepare_s": 4.0, "capture_s": 8.0, "fence_s": 16.0, "join_s": 32.0}
    rest = dict.fromkeys(set(SECONDS) - set(held), 1000.0)
    assert Timing(**held, **rest).held_s == 63.0


def test_bandwidth_is_that_of_writing() -> None:
    assert Timing(write_s=0.5, digest_s=9.0, bytes=1 << 20).bandwidth == 2 << 20
    assert Timing(bytes=1 << 20).bandwidth is None
    assert Timing(write_s=0.5).bandwidth is None


@given(timings)
def test_what_is_told_is_read_back_to_the_microsecond(timing: Timing) -> None:
    told = timing.to_json()
    assert "bytes" not in told
    found = Timing.read(told, timing.bytes)
    assert found is not None
    assert found.bytes == timing.bytes
    for name in SECONDS:
        assert getattr(found, name) == pytest.approx(getattr(timing, name), abs=1e-6)


def test_what_took_no_time_is_not_told() -> None:
    assert Timing(write_s=0.25, fence_s=4e-7, bytes=7).to_json() == {"write_s": 0.25}


@given(anything)
def test_whatever_stands_there_is_read_as_durations_or_not_at_all(told: Any) -> None:
    found = Timing.read(told, 7)
    if not isinstance(told, dict):
        assert found is None
        return
    assert found is not None and found.bytes == 7
    for name in SECONDS:
        value = getattr(found, name)
        assert isinstance(value, float) and 0 <= value < 1e9
        if value:
            assert value == told[name]
