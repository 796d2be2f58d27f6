"""How the words of a chunk change before they are cut into planes, and change back: invertible maps of unsigned words.

Each map is bit for bit: no arithmetic of floats takes place, so NaN payloads, denormals and -0.0 are words like others.
All work on whole arrays, in place where they can: `out` and `spare` have the words' dtype and length, and are no views
of what they are computed from.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

Words = np.ndarray[Any, Any]
"""Unsigned integers of 1, 2, 4 or 8 bytes, one-dimensional."""


class Difference(Protocol):
    """What a codec makes of the words of a chunk, and of its base's."""

    needs_base: bool

    def forward(self, words: Words, base: Words | None, out: Words, spare: tuple[Words, Words]) -> None:
        """Fills `out` with what is cut into planes."""
        ...

    def back(self, coded: Words, base: Words | None, out: Words, spare: tuple[Words, Words]) -> None:
        """Fills `out` with the words. `coded` is overwritten."""
        ...


class Rotated:
    """Each word by itself, rotated left by one bit: the sign goes behind the mantissa, and the exponent of a bf16, fp32
    or f8 fills the first bits, which are what compresses."""

    needs_base = False

    def forward(self, words: Words, base: Words | None, out: Words, spare: tuple[Words, Words]) -> None:
        np.left_shift(words, 1, out=out)
        _or_shifted(out, words, _bits(words) - 1, spare[0], np.right_shift)

    def back(self, coded: Words, base: Words | None, out: Words, spare: tuple[Words, Words]) -> None:
        np.right_shift(coded, 1, out=out)
        _or_shifted(out, coded, _bits(coded) - 1, spare[0], np.left_shift)


class Xor:
    """The bits that differ from the base's, rotated as above."""

    needs_base = True

    def forward(self, words: Words, base: Words | None, out: Words, spare: tuple[Words, Words]) -> None:
        assert base is not None
        np.bitwise_xor(words, base, out=spare[1])
        Rotated().forward(spare[1], None, out, spare)

    def back(self, coded: Words, base: Words | None, out: Words, spare: tuple[Words, Words]) -> None:
        assert base is not None
        Rotated().back(coded, None, out, spare)
        np.bitwise_xor(out, base, out=out)


class Ordered:
    """How many representable numbers lie between the base's and the word's: sign and magnitude become integers in the
    order of the numbers, these are subtracted modulo the word, and zigzag folds the difference's sign into its last
    bit. A small change is a small number even where it carries into the exponent, or through zero."""

    needs_base = True

    def forward(self, words: Words, base: Words | None, out: Words, spare: tuple[Words, Words]) -> None:
        assert base is not None
        ordered, mask = spare
        _in_order(words, out, mask)
        _in_order(base, ordered, mask)
        np.subtract(out, ordered, out=out)
        np.right_shift(_signed(out), _bits(out) - 1, out=_signed(mask))
        np.left_shift(out, 1, out=out)
        np.bitwise_xor(out, mask, out=out)

    def back(self, coded: Words, base: Words | None, out: Words, spare: tuple[Words, Words]) -> None:
        assert base is not None
        ordered, mask = spare
        np.bitwise_and(coded, 1, out=mask)
        np.negative(mask, out=mask)
        np.right_shift(coded, 1, out=coded)
        np.bitwise_xor(coded, mask, out=coded)
        _in_order(base, ordered, mask)
        np.add(coded, ordered, out=coded)
        _in_order(coded, out, mask)


def _in_order(words: Words, out: Words, spare: Words) -> None:
    """Maps sign and magnitude to two's complement in the same order; all but the sign of negative words is inverted. It
    is its own inverse."""
    np.right_shift(_signed(words), _bits(words) - 1, out=_signed(spare))
    np.right_shift(spare, 1, out=spare)
    np.bitwise_xor(words, spare, out=out)


def _or_shifted(out: Words, words: Words, bits: int, spare: Words, shift: np.ufunc) -> None:
    shift(words, bits, out=spare)
    np.bitwise_or(out, spare, out=out)


def _bits(words: Words) -> int:
    bits: int = words.dtype.itemsize * 8
    return bits


def _signed(words: Words) -> Words:
    return words.view(f"<i{words.dtype.itemsize}")
