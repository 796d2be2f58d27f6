"""ResumableSampler: every sample once per epoch, in an order of its own."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.errors import StateMismatch, UsageError
from tenuto.integrations.torch.data.sampler import ResumableSampler


@settings(max_examples=40, derandomize=True, deadline=None)
@given(length=st.integers(0, 50), taken=st.integers(0, 60), epoch=st.integers(0, 3), shuffle=st.booleans())
def test_goes_on_where_it_was(length: int, taken: int, epoch: int, shuffle: bool) -> None:
    sampler = ResumableSampler(range(length), seed=5, shuffle=shuffle)
    sampler.set_epoch(epoch)
    iterator = iter(sampler)
    first = list(islice(iterator, taken))
    saved = sampler.state_dict()
    rest = list(iterator)
    assert sorted(first + rest) == list(range(length))

    torch.rand(1)
    other = ResumableSampler(range(length), seed=6, shuffle=shuffle)
    other.load_state_dict(saved)
    assert list(other) == rest
    assert list(other) == list(sampler)  # the next epoch


def test_epochs_differ_and_repeat() -> None:
    sampler = ResumableSampler(range(30), seed=0)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(ResumableSampler(range(30), seed=1)) not in (first, second)


def test_without_a_seed_it_follows_torchs_and_ignores_draws() -> None:
    torch.manual_seed(3)
    first = list(ResumableSampler(range(30)))
    torch.manual_seed(3)
    torch.rand(5)
    sampler = ResumableSampler(range(30))
    before = torch.get_rng_state()
    assert list(sampler) == first
    assert torch.equal(before, torch.get_rng_state())
    assert sampler.state_dict()["seed"] == 3


def test_other_data_is_refused() -> None:
    saved = ResumableSampler(range(3)).state_dict()
    with pytest.raises(StateMismatch, match="length"):
        ResumableSampler(range(4)).load_state_dict(saved)
    with pytest.raises(StateMismatch, match="shuffle"):
        ResumableSampler(range(3), shuffle=False).load_state_dict(saved)
    with pytest.raises(UsageError):
        ResumableSampler(range(3), seed=2**70)
