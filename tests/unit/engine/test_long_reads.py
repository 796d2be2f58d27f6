"""A store whose reads are requests is read in parts of the length that it asks for, and as many at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from tenuto.errors import NothingRestorable
from tenuto.maintenance.verify import assert_whole
from tenuto.repo.repository import Repo
from tenuto.testing.object_store import HEAD, Bucket, Request, SimulatedObjectStore

PART = 4 << 20


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


def place(bucket: Bucket) -> SimulatedObjectStore:
    return SimulatedObjectStore(bucket, part_bytes=PART, parallel=12)


def saved(bucket: Bucket) -> dict[str, Any]:
    drawn = np.random.default_rng(1)
    state = {
        "large": drawn.random(3_000_000),
        "middle": {str(n): drawn.random(40_000) for n in range(20)},
        "small": {str(n): drawn.random(n) for n in range(200)},
    }
    tenuto.save(state, place(bucket))
    bucket.forget()
    return state


def reads(bucket: Bucket) -> list[Request]:
    return [one for one in bucket.requests if ".safetensors" in one.name]


def same(one: Any, other: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(leaves(one), leaves(other), strict=True))


def leaves(tree: Any) -> list[Any]:
    return [leaf for key in sorted(tree) for leaf in leaves(tree[key])] if isinstance(tree, dict) else [tree]


def test_a_restore_reads_in_parts_of_the_length_that_the_store_asks_for(bucket: Bucket) -> None:
    state = saved(bucket)
    assert same(tenuto.load(place(bucket)).state, state)
    length = sum(leaf.nbytes for leaf in leaves(state))
    assert len(reads(bucket)) <= length / PART + 4


def test_verify_reads_long_parts_too(bucket: Bucket) -> None:
    state = saved(bucket)
    assert_whole(Repo.open(place(bucket)))
    assert len(reads(bucket)) <= sum(leaf.nbytes for leaf in leaves(state)) / PART + 4


def test_a_leaf_of_an_opened_checkpoint_is_read_in_long_parts(bucket: Bucket) -> None:
    state = saved(bucket)
    with tenuto.open(place(bucket)) as checkpoint:
        bucket.forget()
        assert np.array_equal(np.asarray(checkpoint["large"]), state["large"])
    assert len(reads(bucket)) <= state["large"].nbytes / PART + 2


def test_i5_a_flipped_bit_in_a_long_part_names_its_leaf(bucket: Bucket) -> None:
    saved(bucket)
    name = next(name for name in bucket.objects if name.endswith(".safetensors"))
    data = bytearray(bucket.objects[name][0])
    data[HEAD + 12_345_678] ^= 1
    bucket.objects[name] = bytes(data), 1
    with pytest.raises(NothingRestorable, match="large is damaged"):
        tenuto.load(place(bucket), step="latest")


def test_a_local_store_is_read_as_before(tmp_path: Path) -> None:
    from tenuto.engine.read.chunk_reader import long_reads

    tenuto.save({"w": np.zeros(10)}, tmp_path)
    from tenuto.store.registry import open_store

    assert long_reads(Repo.open(open_store(tmp_path))) == 0
