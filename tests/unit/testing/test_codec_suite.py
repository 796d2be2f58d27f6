"""The suite for codecs: one that is right passes, and those that leave something out do not."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import pytest

from tenuto.codec.contract import damaged
from tenuto.testing.codec_suite import CodecSuite


class Right:
    """A codec of zlib's: what the others here are, but for one fault each."""

    name = "right"
    needs_base = False

    def encode(self, raw: memoryview, base: memoryview | None = None) -> bytes | None:
        stored = zlib.compress(raw, 1)
        return stored if len(stored) < len(raw) else None

    def decode(self, stored: memoryview, out: memoryview, base: memoryview | None = None) -> None:
        stream = zlib.decompressobj()
        try:
            data = stream.decompress(stored, len(out) + 1) if len(stored) < len(out) else b""
        except zlib.error as error:
            raise damaged(self.name, str(error)) from error
        if len(data) != len(out) or not stream.eof or stream.unused_data:
            raise damaged(self.name, "another length")
        out[:] = data


class QuietsNaNs(Right):
    def encode(self, raw: memoryview, base: memoryview | None = None) -> bytes | None:
        words = np.frombuffer(raw, "<u4", len(raw) // 4).copy()
        words[(words & 0x7F800000 == 0x7F800000) & (words & 0x7FFFFF != 0)] |= 0x400000
        return super().encode(memoryview(words.tobytes() + raw[len(words) * 4 :]))


class LosesTheTail(Right):
    def encode(self, raw: memoryview, base: memoryview | None = None) -> bytes | None:
        return super().encode(memoryview(bytes(raw[: len(raw) // 4 * 4]) + bytes(len(raw) % 4)))


class Expands(Right):
    def encode(self, raw: memoryview, base: memoryview | None = None) -> bytes | None:
        return zlib.compress(raw, 1)


class TrustsTheStream(Right):
    """Takes whatever length the stream has."""

    def decode(self, stored: memoryview, out: memoryview, base: memoryview | None = None) -> None:
        try:
            data = zlib.decompress(stored)
        except zlib.error as error:
            raise damaged(self.name, str(error)) from error
        if len(data) != len(out):
            raise damaged(self.name, "another length")
        out[:] = data


class RaisesItsOwn(Right):
    def decode(self, stored: memoryview, out: memoryview, base: memoryview | None = None) -> None:
        data = zlib.decompressobj().decompress(stored, len(out) + 1)
        out[:] = data[: len(out)].ljust(len(out), b"\0")


class PassesOverTheRest(Right):
    """Takes what stands behind the stream for nothing."""

    def decode(self, stored: memoryview, out: memoryview, base: memoryview | None = None) -> None:
        stream = zlib.decompressobj()
        try:
            data = stream.decompress(stored, len(out))
        except zlib.error as error:
            raise damaged(self.name, str(error)) from error
        if len(data) != len(out):
            raise damaged(self.name, "another length")
        out[:] = data


class WritesToItsInput(Right):
    def encode(self, raw: memoryview, base: memoryview | None = None) -> bytes | None:
        if not raw.readonly and len(raw):
            raw[0] ^= 1
        return super().encode(raw)


class SharesItsBuffer(Right):
    """One buffer for all threads, over which each call goes twice."""

    def __init__(self) -> None:
        self.kept = bytearray(1 << 19)

    def encode(self, raw: memoryview, base: memoryview | None = None) -> bytes | None:
        self.kept[: len(raw)] = raw
        zlib.compress(raw, 9)  # lets the others run
        return super().encode(memoryview(bytes(self.kept[: len(raw)])))


CHECKS = [one for one in vars(CodecSuite) if one.startswith("test_")]


def suite_of(codec: Right) -> CodecSuite:
    class Suite(CodecSuite):
        def codec(self) -> Right:
            return codec

    return Suite()


@pytest.mark.parametrize("check", CHECKS)
def test_a_right_codec_passes(check: str) -> None:
    getattr(suite_of(Right()), check)()


@pytest.mark.parametrize(
    ("broken", "check", "error", "said"),
    [
        (QuietsNaNs, "every_chunk_comes_back_bit_for_bit", AssertionError, "NaN payloads|the same, float32"),
        (LosesTheTail, "every_chunk_comes_back_bit_for_bit", AssertionError, "another chunk came back"),
        (Expands, "every_chunk_comes_back_bit_for_bit", AssertionError, "no shorter than the chunk"),
        (TrustsTheStream, "a_chunk_of_another_length_is_no_reason_to_take_more_memory", AssertionError, "stored bytes"),
        (RaisesItsOwn, "damage_at_any_byte_is_an_error_or_another_chunk", zlib.error, "-3"),
        (PassesOverTheRest, "a_chunk_that_is_cut_or_goes_on_is_refused", AssertionError, "give the same chunk"),
        (
            WritesToItsInput,
            "it_writes_to_nothing_but_the_chunk",
            AssertionError,
            "what it was given has changed|in other bytes",
        ),
        (SharesItsBuffer, "threads_do_not_disturb_each_other", AssertionError, "mixed up"),
    ],
)
def test_a_broken_codec_does_not_pass(
    broken: Callable[[], Right], check: str, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        getattr(suite_of(broken()), f"test_{check}")()
