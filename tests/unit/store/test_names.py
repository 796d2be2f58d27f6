from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.errors import StoreError
from tenuto.store.contract import check_name, check_new_name, check_prefix, check_token, final_name, is_leftover


@settings(max_examples=150, derandomize=True)
@given(st.text(alphabet=st.sampled_from("ab./\\\0~ \n\ud800é"), max_size=12))
def test_an_accepted_name_stays_below_the_root(name):
    try:
        check_name(name)
    except StoreError:
        return
    assert os.path.normpath(f"/root/{name}") == f"/root/{name}"
    os.fsencode(name)


@pytest.mark.parametrize(
    "name", ["a", "runs/main/a0001/step-00000005/rank-00000.safetensors", "..a", "a..", "...", "~"]
)
def test_names(name):
    assert check_new_name(name) == name
    assert check_prefix(name) == name


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[0m", "a/.tmp-b", "x.tmp-", "\u202e"])
def test_names_that_are_never_put(name):
    with pytest.raises(StoreError):
        check_new_name(name)


@pytest.mark.parametrize("name", [None, 5, b"x"])
def test_what_is_no_text(name):
    with pytest.raises(StoreError):
        check_name(name)


def test_prefixes_tokens_and_leftovers():
    assert check_prefix("") == ""
    assert check_token("0123abcdEF-_") == "0123abcdEF-_"
    assert is_leftover("runs/a/x.tmp-1") and not is_leftover("runs.tmp-1/a/x")
    assert is_leftover("runs/a/x.part-1") and not is_leftover("runs.part-1/a/x")


@pytest.mark.parametrize("name", ["a.part-1/x", "a.part-1/x.tmp-1", "a.part-1/x.part-2", "a.part-1/x.part-2.tmp-1"])
def test_a_leftover_belongs_to_an_object(name):
    assert final_name(name) == "a.part-1/x"
