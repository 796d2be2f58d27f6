"""Reading many leaves: each arrives whole, whatever kind of destination it has, and damage names its own leaf."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tenuto
from tenuto.concurrency.worker_threads import parallel_for
from tenuto.engine.read import chunk_reader as reading
from tenuto.engine.read.leaf_reader import Staged, read_leaves
from tenuto.engine.read.packs import open_pack
from tenuto.engine.read.read_segments import ContiguousReads
from tenuto.errors import CorruptionError
from tenuto.model.records import Index, Manifest
from tenuto.repo.lineage import resolve
from tenuto.repo.repository import Repo
from tenuto.state.contract import Buffer, Sink
from tenuto.state.numpy_arrays import ArraySink
from tenuto.store.memory import MemoryStore


class Filled:
    """A sink without memory to offer."""

    def __init__(self) -> None:
        self.data = b""

    @property
    def buffer(self) -> Buffer | None:
        return None

    def span(self) -> None:
        return None

    def fill(self, data: Buffer) -> None:
        self.data = data.tobytes()

    @property
    def fill_part(self) -> Callable[[int, Buffer], None] | None:
        return None


class FilledInParts(Filled):
    """A sink without memory to offer, which takes what has come."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self._parts = np.zeros(nbytes, np.uint8)
        self.taken = 0

    @property
    def fill_part(self) -> Callable[[int, Buffer], None]:
        return self._part

    def _part(self, start: int, data: Buffer) -> None:
        self._parts[start : start + len(data)] = data
        self.taken += len(data)
        self.data = self._parts.tobytes()


class Spanned(ArraySink):
    """A sink that only ever says where its memory is."""

    @property
    def buffer(self) -> Buffer | None:
        raise AssertionError("small leaves are not asked for their buffer")


def saved(arrays: list[np.ndarray[Any, Any]]) -> tuple[Repo, Manifest, Index]:
    store = MemoryStore("reading")
    tenuto.save({f"{number:05}": array for number, array in enumerate(arrays)}, store)
    repo = Repo.open(store)
    manifest = repo.manifest(resolve(repo, "main", "latest"))
    return repo, manifest, repo.index(manifest)


@contextmanager
def without_views() -> Iterator[None]:
    """Packs that have to be read, as from a device."""

    def unseen(*where: Any, **how: Any) -> Any:
        pack = open_pack(*where, **how)
        pack.view = None
        return pack

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "open_pack", unseen)
        yield


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.sampled_from([0, 1, 7, 1000, 16_383, 16_384, 140_000, 262_145, 600_000]), st.integers(0, 4)),
        min_size=1,
        max_size=12,
    ),
    st.booleans(),
)
def test_every_kind_of_destination_gets_its_leaf(leaves: list[tuple[int, int]], viewed: bool) -> None:
    random = np.random.default_rng(3)
    arrays = [random.integers(0, 256, length, np.uint8) for length, _ in leaves]
    repo, manifest, index = saved(arrays)
    targets = [np.zeros_like(array) for array in arrays]
    sinks: list[Sink] = []
    for target, (length, kind) in zip(targets, leaves, strict=True):
        spanned = Spanned(target) if 0 < length < 16_384 else ArraySink(target)
        sinks.append([ArraySink(target), spanned, Staged(length), Filled(), FilledInParts(length)][kind])
    wants = list(enumerate(sinks))[::-1]
    if viewed:
        moved = read_leaves(repo, manifest, index, wants)
    else:
        with without_views():
            moved = read_leaves(repo, manifest, index, wants)
    assert moved == sum(length for length, _ in leaves)
    for array, target, sink in zip(arrays, targets, sinks, strict=True):
        found = sink.data if isinstance(sink, Staged | Filled) else target
        assert bytes(found) == array.tobytes()
        if isinstance(sink, FilledInParts) and len(array) >= 16_384:
            assert sink.taken == len(array), "each byte once, and never as a whole"


@pytest.mark.parametrize("viewed", [True, False])
def test_the_short_end_of_a_long_leaf_goes_where_the_leaf_does(viewed: bool) -> None:
    """It lies beside small leaves, which are copied by their addresses; a long one has none."""
    lengths = [(1 << 20) + 64, 128, (16 << 20) + 64, 192]
    arrays = [np.random.default_rng(length).integers(0, 256, length, np.uint8) for length in lengths]
    repo, manifest, index = saved(arrays)
    targets = [np.zeros_like(array) for array in arrays]
    sinks = [Spanned(target) if len(target) < 16_384 else ArraySink(target) for target in targets]
    wants: list[tuple[int, Sink]] = list(enumerate(sinks))
    if viewed:
        read_leaves(repo, manifest, index, wants)
    else:
        with without_views():
            read_leaves(repo, manifest, index, wants)
    assert all(np.array_equal(target, array) for target, array in zip(targets, arrays, strict=True))


@pytest.mark.parametrize("viewed", [True, False])
@pytest.mark.parametrize("leaf", [0, 1, 450, 999])
def test_damage_among_many_small_leaves_names_its_own(leaf: int, viewed: bool) -> None:
    repo, manifest, index = saved([np.full(1024, number % 251, np.uint8) for number in range(1000)])
    digests = index.digests.copy()
    digests[leaf, 3] ^= 1
    index = Index(**{name: getattr(index, name) for name in Index.__slots__} | {"digests": digests})
    sinks = [Staged(1024) for _ in range(1000)]
    for sink in sinks:
        sink.data[:] = 252
    expected = rf"{leaf:05} is damaged: .*, 1024 bytes from offset {index.offset[leaf]}, are not what was saved"
    with pytest.raises(CorruptionError, match=expected) as caught:
        if viewed:
            read_leaves(repo, manifest, index, list(enumerate(sinks)))
        else:
            with without_views():
                read_leaves(repo, manifest, index, list(enumerate(sinks)))
    assert caught.value.subject == f"{leaf:05}"
    # Bytes that are not what was saved reach no small destination.
    assert (sinks[leaf].data == 252).all()


def test_a_destination_of_another_length_is_refused_before_anything_is_read() -> None:
    repo, manifest, index = saved([np.ones(100, np.uint8), np.ones(100, np.uint8)])
    short = np.zeros(99, np.uint8)
    first = Staged(100)
    first.data[:] = 0
    for sink in (ArraySink(short), Staged(99)):
        with pytest.raises(CorruptionError, match="00001 has 100 bytes in the checkpoint and 99 in the target"):
            read_leaves(repo, manifest, index, [(0, first), (1, sink)])
    assert not first.data.any()


def test_work_is_handed_out_until_one_fails() -> None:
    done: list[int] = []

    def work(number: int) -> None:
        if number == 5:
            raise ValueError(number)
        done.append(number)

    parallel_for(work, [], 4)
    parallel_for(work, [1], 4)
    parallel_for(work, [2, 3, 4], 4)
    assert sorted(done) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="5"):
        parallel_for(work, [5, *range(6, 100_000)], 2)
    assert len(done) < 100_000
    with pytest.raises(ValueError, match="5"):
        parallel_for(work, [5], 2)


def test_tensors_of_every_arrangement_get_their_values() -> None:
    torch = pytest.importorskip("torch")
    made = [torch.arange(12.0).reshape(3, 4) + number for number in range(40)]
    made[7] = torch.complex(made[7], -made[7])
    store = MemoryStore("arrangements")
    tenuto.save({f"w{number}": one for number, one in enumerate(made)}, store)
    target = {f"w{number}": torch.zeros_like(one) for number, one in enumerate(made)}
    target["w3"] = torch.zeros(4, 3).t()
    target["w5"] = torch._neg_view(torch.zeros(3, 4))
    target["w7"] = torch.zeros(3, 4, dtype=torch.complex64).conj()
    target["w9"] = torch.zeros(3, 8)[:, ::2]
    held = dict(target)
    tenuto.load(store, target)
    for number, one in enumerate(made):
        assert target[f"w{number}"] is held[f"w{number}"] and torch.equal(held[f"w{number}"], one), number


def test_runs_are_cut_into_pieces_where_their_sinks_take_parts() -> None:
    """As ranks of a node share them: one run longer than a window would be read by each for itself."""
    content = np.random.default_rng(1).integers(0, 256, 100, np.uint8)
    filled, array, whole = FilledInParts(100), np.zeros(100, np.uint8), Filled()
    column = np.arange(3)
    runs = ContiguousReads(column * 0, column, column * 0, column * 0 + 100, [filled, ArraySink(array), whole])
    pieces = runs.split(30)
    assert pieces.row.tolist() == [0] * 4 + [1] * 4 + [2]
    for line, sink in enumerate(pieces.sinks):
        piece = content[int(pieces.first[line]) : int(pieces.stop[line])]
        if sink.buffer is not None:
            sink.buffer[:] = piece
        elif sink.fill_part is not None:
            sink.fill_part(0, piece[:7])
            sink.fill_part(7, piece[7:])
        else:
            sink.fill(piece)
    assert filled.data == array.tobytes() == whole.data == content.tobytes()
