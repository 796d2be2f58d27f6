"""Chunks, wrapped keys and codes: what was sealed comes back, and nothing else ever does."""

from __future__ import annotations

import secrets
import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.errors import CorruptionError, KeyMissing, MissingExtra, Tampered, UsageError
from tenuto.seal import cipher
from tenuto.seal.cipher import KEY, MAX_CHUNK, TAG, Identity, PackKey, open_chunk, seal_chunk
from tenuto.seal.keys import RepositoryKeys

REPOSITORY = "a" * 32
PACK = Identity(REPOSITORY, "b" * 32, "rank-00000.pack")
KEYS = RepositoryKeys(REPOSITORY, 2, {1: secrets.token_bytes(KEY), 2: secrets.token_bytes(KEY)})
OTHERS = [
    replace(PACK, repository="c" * 32),
    replace(PACK, save_id="c" * 32),
    replace(PACK, name="rank-00001.pack"),
    # The parts are bound one by one: moving a character from one to the next is another identity.
    Identity(REPOSITORY + "b", "b" * 31, "rank-00000.pack"),
]

chunks = st.lists(st.binary(max_size=200), max_size=8)


@given(chunks=chunks, start=st.integers(0, 1 << 20))
def test_chunks_come_back_from_their_places(chunks: list[bytes], start: int) -> None:
    sealer = KEYS.new_pack(PACK, start=start)
    frames = [sealer.seal(chunk) for chunk in chunks]
    pack = KEYS.open_pack(sealer.wrapped, PACK)
    assert [bytes(open_chunk(pack, frame, place)) for place, frame in frames] == chunks
    assert all(len(frame) == len(chunk) + TAG for (_, frame), chunk in zip(frames, chunks, strict=True))
    end = start
    for place, frame in frames:  # one after the other, without a hole
        assert place == end
        end += len(frame)
    assert sealer.end == end


def test_a_chunk_is_opened_into_the_callers_buffer() -> None:
    sealer = KEYS.new_pack(PACK)
    place, frame = sealer.seal(b"abc" * 1000)
    pack = KEYS.open_pack(sealer.wrapped, PACK)
    buffer = bytearray(4000)
    open_chunk(pack, memoryview(frame), place, memoryview(buffer)[10:3010])
    assert buffer == bytes(10) + b"abc" * 1000 + bytes(990)
    for length in (2999, 3001):
        with pytest.raises(Tampered, match=r"rank-00000\.pack"):
            open_chunk(pack, frame, place, memoryview(bytearray(length)))


@pytest.mark.parametrize("raw", [b"", b"\0" * 40])
def test_every_flipped_bit_of_a_frame_is_refused(raw: bytes) -> None:
    sealer = KEYS.new_pack(PACK)
    place, frame = sealer.seal(raw)
    pack = KEYS.open_pack(sealer.wrapped, PACK)
    for bit in range(8 * len(frame)):
        changed = bytearray(frame)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Tampered) as caught:
            open_chunk(pack, changed, place)
        assert caught.value.object == PACK.name
    for length in range(len(frame)):
        with pytest.raises(Tampered):
            open_chunk(pack, frame[:length], place)
    with pytest.raises(Tampered):
        open_chunk(pack, frame + b"\0", place)


def test_frames_that_changed_places_packs_or_checkpoints_are_refused() -> None:
    key = secrets.token_bytes(KEY)  # one data key for all: the identity alone has to tell them apart
    pack = PackKey(key, PACK)
    frame = seal_chunk(pack, b"weights", 100)
    assert bytes(open_chunk(pack, frame, 100)) == b"weights"
    for place in (0, 101, 123, -1, 1 << 62, 1 << 100):
        with pytest.raises(Tampered, match=f"byte {place}"):
            open_chunk(pack, frame, place)
    for other in OTHERS:
        with pytest.raises(Tampered):
            open_chunk(PackKey(key, other), frame, 100)
    with pytest.raises(Tampered):
        open_chunk(PackKey(secrets.token_bytes(KEY), PACK), frame, 100)


def test_a_data_key_opens_for_its_own_pack_alone() -> None:
    sealer = KEYS.new_pack(PACK)
    for other in OTHERS:
        with pytest.raises(Tampered, match=other.name):
            KEYS.open_pack(sealer.wrapped, other)
    number, _, digits = sealer.wrapped.partition(":")
    assert number == "2"
    for place in range(len(digits)):
        changed = digits[:place] + ("0" if digits[place] != "0" else "1") + digits[place + 1 :]
        with pytest.raises(Tampered):
            KEYS.open_pack(f"2:{changed}", PACK)
    with pytest.raises(Tampered):
        KEYS.open_pack(f"1:{digits}", PACK)
    with pytest.raises(KeyMissing, match=r"needs key 3 .* set back"):
        KEYS.open_pack(f"3:{digits}", PACK)
    for hostile in (
        "",
        ":",
        digits,
        f"0:{digits}",
        f"-1:{digits}",
        f"²:{digits}",
        "2:",
        "2:xy",
        f"{'9' * 30}:{digits}",
    ):
        with pytest.raises(CorruptionError, match=PACK.name):
            KEYS.open_pack(hostile, PACK)


def test_no_key_and_nonce_are_used_twice() -> None:
    """The same chunk, sealed again in whatever way, is other bytes each time."""
    sealer = KEYS.new_pack(PACK)
    frames = [sealer.seal(b"the same") for _ in range(100)]
    again = KEYS.new_pack(PACK)
    frames += [again.seal(b"the same") for _ in range(100)]
    assert len({frame for _, frame in frames}) == 200
    assert len({place for place, _ in frames}) == 100
    assert len({KEYS.new_pack(PACK).wrapped for _ in range(100)}) == 100


def test_places_are_given_once_with_many_threads() -> None:
    sealer = KEYS.new_pack(PACK)
    found: list[tuple[int, bytes]] = []

    def work(number: int) -> None:
        found.extend(sealer.seal(bytes([number]) * (100 + number)) for _ in range(200))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.sort()
    ends = [place + len(frame) for place, frame in found]
    assert [place for place, _ in found] == [0, *ends[:-1]]
    pack = KEYS.open_pack(sealer.wrapped, PACK)
    assert all(len(set(bytes(open_chunk(pack, frame, place)))) == 1 for place, frame in found)


def test_a_chunk_beyond_the_limit_is_refused_on_both_sides() -> None:
    sealer = KEYS.new_pack(PACK)
    with pytest.raises(UsageError, match=r"at most 16\.0 MiB"):
        sealer.seal(bytes(MAX_CHUNK + 1))
    pack = KEYS.open_pack(sealer.wrapped, PACK)
    with pytest.raises(Tampered):
        open_chunk(pack, bytes(MAX_CHUNK + TAG + 1), 0)


def test_every_changed_or_missing_character_of_a_wrapped_key_is_refused() -> None:
    wrapped = KEYS.new_pack(PACK).wrapped
    for place, old in enumerate(wrapped):
        for new in "0123456789abcdef:x":
            if new != old:
                with pytest.raises((CorruptionError, KeyMissing)):  # KeyMissing: the number of the key is part of it
                    KEYS.open_pack(wrapped[:place] + new + wrapped[place + 1 :], PACK)
    for length in range(len(wrapped)):
        with pytest.raises(CorruptionError, match=PACK.name):
            KEYS.open_pack(wrapped[:length], PACK)
    with pytest.raises(Tampered):
        KEYS.open_pack(wrapped + "00", PACK)


def test_what_an_older_key_has_sealed_opens_and_a_stranger_opens_nothing() -> None:
    older = RepositoryKeys(REPOSITORY, 1, {1: KEYS.key(1, "x")})
    code, sealer = older.sign_object(b"o"), older.new_pack(PACK)
    KEYS.check_object(b"o", code, "manifest.json")
    KEYS.open_pack(sealer.wrapped, PACK)
    stranger = RepositoryKeys(REPOSITORY, 1, {1: secrets.token_bytes(KEY)})
    with pytest.raises(Tampered):
        stranger.open_pack(sealer.wrapped, PACK)
    with pytest.raises(Tampered, match=r"manifest\.json"):
        stranger.check_object(b"o", code, "manifest.json")
    with pytest.raises(KeyMissing):
        older.open_pack(KEYS.new_pack(PACK).wrapped, PACK)


@settings(max_examples=50)
@given(data=st.binary(min_size=1, max_size=100), at=st.integers(0), bit=st.integers(0, 7))
def test_a_code_is_that_of_its_bytes_alone(data: bytes, at: int, bit: int) -> None:
    code = KEYS.sign_object(data)
    KEYS.check_object(data, code, "m")
    changed = bytearray(data)
    changed[at % len(data)] ^= 1 << bit
    for other, of in (
        (changed, code),
        (data[:-1], code),
        (data, code[:-1]),
        (data, code[:-2] + "é!"),
        (data, "1" + code[1:]),
    ):
        with pytest.raises(Tampered):
            KEYS.check_object(other, of, "m")


def test_keys_for_several_purposes_differ() -> None:
    key = secrets.token_bytes(KEY)
    wrapped = cipher.wrap(key, b"secret", purpose="slot", bound=b"x")
    assert cipher.unwrap(key, wrapped, purpose="slot", bound=b"x") == b"secret"
    assert cipher.unwrap(key, wrapped, purpose="table", bound=b"x") is None
    assert cipher.unwrap(key, wrapped, purpose="slot", bound=b"y") is None


def test_keys_are_neither_shown_nor_pickled() -> None:
    import copy
    import pickle

    assert KEYS.newest.hex() not in repr(KEYS) and repr(KEYS.newest) not in repr(KEYS)
    for leak in (pickle.dumps, copy.deepcopy):
        with pytest.raises(UsageError, match="not pickled"):
            leak(KEYS)


def test_without_cryptography_one_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in [name for name in sys.modules if name.startswith("cryptography")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(MissingExtra, match=r"tenuto\[seal\]") as caught:
        KEYS.new_pack(PACK)
    assert ".[seal]" in str(caught.value.hint)
