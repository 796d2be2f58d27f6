"""The code of large content: who has the key knows what it was made of, and nothing else has it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.errors import CorruptionError, KeyMissing, Tampered
from tenuto.seal import content_code
from tenuto.seal.content_code import check_content, sign_content
from tenuto.seal.keys import RepositoryKeys

KEYS = RepositoryKeys("ab" * 16, 2, {1: b"a" * 32, 2: b"b" * 32})
OTHERS = RepositoryKeys("ab" * 16, 2, {1: b"a" * 32, 2: b"c" * 32})
PARTS = st.lists(st.binary(max_size=40), min_size=1, max_size=4)


@pytest.fixture(autouse=True, scope="module")
def _short_pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(content_code, "PIECE", 16)
        yield


@given(PARTS, st.binary(max_size=8))
def test_it_is_known_again_by_who_has_the_key(parts: list[bytes], identity: bytes) -> None:
    code = sign_content(KEYS, identity, parts)
    check_content(KEYS, identity, parts, code, "it")
    assert code != sign_content(KEYS, identity, parts), "no key and nonce come twice"
    with pytest.raises(Tampered):
        check_content(OTHERS, identity, parts, code, "it")
    with pytest.raises(Tampered):
        check_content(KEYS, identity + b"x", parts, code, "it")


@given(PARTS, st.data())
def test_any_other_bytes_are_refused(parts: list[bytes], data: st.DataObject) -> None:
    code = sign_content(KEYS, b"it", parts)
    other = data.draw(st.one_of(PARTS, _changed(parts)))
    if other != parts:
        with pytest.raises(Tampered):
            check_content(KEYS, b"it", other, code, "it")


@st.composite
def _changed(draw: st.DrawFn, parts: list[bytes]) -> list[bytes]:
    """One bit of them, or where one ends and the next begins, or pieces in another order."""
    whole = b"".join(parts)
    kind = draw(st.sampled_from(["bit", "cut", "order"]))
    if kind == "bit" and whole:
        at, bit = draw(st.integers(0, len(whole) - 1)), draw(st.integers(0, 7))
        changed = bytearray(whole)
        changed[at] ^= 1 << bit
        ends = [sum(map(len, parts[: number + 1])) for number in range(len(parts))]
        return [bytes(changed[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
    if kind == "cut":
        at = draw(st.integers(0, len(whole)))
        return [whole[:at], whole[at:]]
    pieces = [whole[at : at + 16] for at in range(0, len(whole), 16)]
    return [b"".join(draw(st.permutations(pieces)))]


@pytest.mark.parametrize("code", ["", "x", "1:", "1:zz", "2:" + "0" * 96, "1:" + "0" * 20])
def test_what_is_no_code_is_refused(code: str) -> None:
    with pytest.raises(CorruptionError) as caught:
        check_content(KEYS, b"it", [b"some"], code, "it")
    assert caught.value.subject == "it"


def test_a_code_by_a_key_that_is_gone_says_which() -> None:
    newer = RepositoryKeys("ab" * 16, 3, {3: b"d" * 32})
    with pytest.raises(KeyMissing, match="needs key 3"):
        check_content(KEYS, b"it", [b"some"], sign_content(newer, b"it", [b"some"]), "it")
