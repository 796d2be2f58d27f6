"""The health of a checkpoint: as its manifest has it, and of several ranks together."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.model import canonical_json
from tenuto.model.health import Health, united

FOUND = st.builds(
    Health,
    st.integers(0, 1 << 40),
    st.lists(st.text(max_size=5), max_size=8).map(tuple),
    st.integers(0, 1 << 52),
    st.floats(min_value=0, allow_nan=False),
    st.none() | st.integers(0, 1_000_000).map(lambda one: one / 1e6),
)


@given(FOUND)
def test_what_a_manifest_has_is_what_the_save_has_found(found: Health) -> None:
    assert Health.read(canonical_json.loads(canonical_json.dumps(found.to_json()))) == found
    assert found.healthy == (str(found) == "")


WHOLE = Health(1, ("w",), 3, 2.0, 0.5).to_json()


@pytest.mark.parametrize(
    "wrong",
    [
        *({"leaves": one} for one in (-1, "1", True, None)),
        *({"paths": one} for one in ("w", [1], ["w"] * 9, None)),
        *({"norm": one} for one in ("x", None, {"!": "float", "v": "?"}, [])),
        *({"changed": one} for one in (2, -0.1, "0.5", True, math.nan)),
        {"nonfinite": -1},
    ],
)
def test_what_no_save_writes_is_refused(wrong: dict[str, Any]) -> None:
    assert Health.read(WHOLE) == Health(1, ("w",), 3, 2.0, 0.5)
    with pytest.raises(ValueError):
        Health.read(WHOLE | wrong)


def test_of_several_ranks_a_leaf_counts_once_and_bytes_weigh() -> None:
    first, second = Health(2, ("w", "v"), 3, 3.0, 1.0), Health(1, ("w",), 1, 4.0, 0.0)
    assert united([(first, 100), (second, 300)]) == Health(2, ("w", "v"), 4, 5.0, 0.25)
    assert united([(first, 100), (Health(), 300)]).changed is None


def test_only_three_leaves_are_named_in_a_message() -> None:
    assert str(Health(5, tuple("abcde"), 5)) == "5 leaves with NaN or infinities (a, b, c and 2 more)"
