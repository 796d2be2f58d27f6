from __future__ import annotations

import pytest

from tenuto.errors import UsageError
from tenuto.model.sizes import parse_bytes, parse_rate, parse_time


@pytest.mark.parametrize(
    "text, nbytes",
    [
        ("500GB", 500_000_000_000),
        ("64MiB", 64 << 20),
        ("64 mib", 64 << 20),
        ("1.5k", 1500),
        ("7", 7),
        (7, 7),
        ("2TiB", 2 << 40),
    ],
)
def test_sizes(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "5 gibs", "-1GB", "0", 0, -3, True, 1.5, None, "1e9", "10iB", "٣GB"])
def test_what_is_no_size_is_named(text):
    with pytest.raises(UsageError, match="capacity="):
        parse_bytes(text, "capacity")


def test_rates():
    assert parse_rate("200MB/s") == 200_000_000 == parse_rate(200_000_000)
    for text in ("200MB", "fast/s", 0, "/s"):
        with pytest.raises(UsageError, match="bandwidth="):
            parse_rate(text, "bandwidth")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90), ("30min", 1800), ("30m", 1800), ("2h", 7200), ("1.5 h", 5400), ("7d", 604_800), ("2w", 1_209_600),
        ("1y", 31_536_000), (1.5, 1.5), (60, 60),
    ],
)  # fmt: skip
def test_a_number_and_its_unit(text: str | float, seconds: float) -> None:
    assert parse_time(text, "every") == seconds


@pytest.mark.parametrize("text", ["", "30", "0s", "x", "often", "5q", "-1h", "1h 30m", 0, -1, float("inf"), True])
def test_what_is_no_time_is_refused_by_name(text: str | float) -> None:
    with pytest.raises(UsageError, match=r"every=.* is not a time"):
        parse_time(text, "every")
