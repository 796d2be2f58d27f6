"""Lazy tensors: any range and any box of them, whatever they are stored as."""

from __future__ import annotations

import subprocess
import sys
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.errors import CorruptionError, UsageError
from tenuto.formats import PiecedTensor, RawFile, RawTensor, Tensor, detect, read
from tenuto.formats.contract import ArrayTensor, leaves, run_boxes
from tenuto.model.leaf import Box

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def in_memory(array: np.ndarray) -> Tensor:
    return ArrayTensor(np.ascontiguousarray(array).reshape(-1).view(np.uint8), "int32", array.shape)


def pieced(array: np.ndarray, pieces: list[Box]) -> PiecedTensor:
    tensors = [(box, in_memory(array[box.slices])) for box in pieces]
    return PiecedTensor("int32", array.shape, tensors, path=Path("x"), what="test", name="t")


def counted(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(prod(shape), dtype=np.int32).reshape(shape)


@given(shapes, st.data())
def test_the_boxes_of_a_run_are_its_items_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    array = counted(shape)
    start = data.draw(st.integers(0, array.size))
    stop = data.draw(st.integers(start, array.size))
    found = [array[box.slices].reshape(-1) for box in run_boxes(shape, start, stop)]
    assert np.concatenate([*found, np.empty(0, np.int32)]).tolist() == list(range(start, stop))
    assert len(found) <= 2 * max(len(shape), 1)


@given(shapes, st.data())
def test_a_box_of_any_tensor_is_what_numpy_slices(shape: tuple[int, ...], data: st.DataObject) -> None:
    array = counted(shape)
    offsets = tuple(data.draw(st.integers(0, length)) for length in shape)
    counts = tuple(data.draw(st.integers(0, length - at)) for length, at in zip(shape, offsets, strict=True))
    box = Box(offsets, counts)
    assert np.array_equal(in_memory(array).read(box), array[box.slices])


@given(shapes, st.data())
def test_a_tensor_in_pieces_reads_like_a_whole_one(shape: tuple[int, ...], data: st.DataObject) -> None:
    array = counted(shape)
    pieces = [Box.whole(shape)]
    for _ in range(data.draw(st.integers(0, 6))):
        box = pieces.pop(data.draw(st.integers(0, len(pieces) - 1)))
        axis = data.draw(st.integers(0, len(shape) - 1)) if shape else -1
        if axis < 0 or box.shape[axis] < 2:
            pieces.append(box)
            continue
        cut = data.draw(st.integers(1, box.shape[axis] - 1))
        for begin, length in ((0, cut), (cut, box.shape[axis] - cut)):
            at = list(box.offsets), list(box.shape)
            at[0][axis] += begin
            at[1][axis] = length
            pieces.append(Box(tuple(at[0]), tuple(at[1])))
    tensor = pieced(array, pieces)
    start = data.draw(st.integers(0, array.size))
    out = np.empty(4 * (data.draw(st.integers(start, array.size)) - start), np.uint8)
    tensor.read_into(out, 4 * start)
    assert out.view(np.int32).tolist() == list(range(start, start + len(out) // 4))
    assert b"".join(block.tobytes() for block in tensor.blocks(12)) == array.tobytes()


@pytest.mark.parametrize(
    "pieces",
    [
        [Box((0, 0), (2, 3)), Box((1, 0), (2, 3))],  # overlap, and leave a hole
        [Box((0, 0), (2, 3))],
        [Box((0, 0), (4, 3)), Box((0, 0), (1, 3))],
        [Box((0, 0), (5, 3))],
        [Box((0,), (4,))],
    ],
)
def test_pieces_that_do_not_make_the_tensor_are_refused(pieces: list[Box]) -> None:
    tensors = [(box, in_memory(counted(box.shape))) for box in pieces]
    with pytest.raises(CorruptionError, match="'t'"):
        PiecedTensor("int32", (4, 3), tensors, path=Path("x"), what="test", name="t")


def test_a_tensor_that_claims_more_than_its_file_has_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "raw"
    path.write_bytes(bytes(100))
    file = RawFile(path, what="raw file")
    assert RawTensor(file, 4, "float32", (24,), name="w").read().tolist() == [0.0] * 24
    for offset, shape in ((5, (24,)), (0, (2**62, 4)), (-1, (1,)), (0, (2**40, 2**40)), (0, (-1,))):
        with pytest.raises(CorruptionError, match="'w'"):
            RawTensor(file, offset, "float32", shape, name="w")
    file.close()
    with pytest.raises(UsageError, match="closed"):
        file.read(0, 1)


def test_paths_of_nested_tensors_are_those_of_a_checkpoint() -> None:
    one = in_memory(counted((2,)))
    tree = {"a": {"x/y": one, 3: one}, "b": [1, one]}
    assert [path for path, _ in leaves(tree)] == ["a/x~1y", "a/#i:3", "b/1"]


def test_what_is_of_no_known_format_is_refused_with_their_names(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    assert detect(path) is None
    with pytest.raises(UsageError, match="npz"):
        read(path)


def test_no_framework_is_imported_by_the_formats_themselves() -> None:
    code = """
import pkgutil, sys, importlib, tenuto.formats
for one in pkgutil.iter_modules(tenuto.formats.__path__):
    if one.name != "keras_h5":  # its reader is h5py, which is no framework
        importlib.import_module("tenuto.formats." + one.name)
heavy = {"torch", "jax", "tensorflow", "keras", "h5py", "orbax", "gguf", "deepspeed", "safetensors"}
assert not heavy & {name.partition(".")[0] for name in sys.modules}, heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
