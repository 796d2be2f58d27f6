from __future__ import annotations

import pytest

from tenuto.errors import UsageError
from tenuto.model.sizes import parse_bytes, parse_rate


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
