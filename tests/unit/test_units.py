import pytest

from tenuto.units import count, ordinal, seconds, size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (12 << 20, "12.0 MiB"),
        ((1 << 20) - 1, "1.00 MiB"),
        (340 << 30, "340 GiB"),
        ((1 << 40) - 1, "1.00 TiB"),
        (5 << 70, "5120 EiB"),
    ],
)
def test_size(nbytes, text):
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (0.00034, "340 us"),
        (0.0125, "12.5 ms"),
        (0.9999, "1.00 s"),
        (3.1, "3.10 s"),
        (31.44, "31.4 s"),
        (59.99, "1 min 00 s"),
        (250, "4 min 10 s"),
        (7500, "2 h 05 min"),
    ],
)
def test_seconds(duration, text):
    assert seconds(duration) == text


def test_count():
    assert [count(n, "leaf") for n in (0, 1, 2000)] == ["0 leaves", "1 leaf", "2,000 leaves"]
    assert count(3, "checkpoint") == "3 checkpoints"


def test_a_place_in_an_order_in_words():
    numbers = [1, 2, 3, 4, 11, 12, 13, 21, 102, 111]
    assert [ordinal(one) for one in numbers] == [
        "1st",
        "2nd",
        "3rd",
        "4th",
        "11th",
        "12th",
        "13th",
        "21st",
        "102nd",
        "111th",
    ]
