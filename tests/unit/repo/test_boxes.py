"""Parts of leaves: rows of an index, and the table that tells which rank has which; every liar is caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from tenuto.codec.chunk_map import chunk_starts
from tenuto.engine.staging.buffer_layout import plan_layout, stored_name
from tenuto.errors import CorruptionError, DuplicatePath
from tenuto.model.ids import CheckpointId
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import Index, PackEntry
from tenuto.repo.format import columns
from tenuto.repo.format import index as index_module
from tenuto.repo.format.index import decode_index, decode_table, encode_index
from tenuto.repo.format.safetensors import build_header, parse_header
from tenuto.repo.format.shard_table import COLUMNS, BoxTable, decode_boxes, encode_boxes

ID = CheckpointId("gpt", 3, 500)
OURS = "9" * 32
SAVE = "0123456789abcdef" * 2
CHUNK = 64

ROWS = (
    LeafSpec("w", "float32", (3, 4), False, (2, 0), (8, 4)),
    LeafSpec("w", "float32", (1, 4), False, (7, 0), (8, 4)),
    LeafSpec("z", "float32", (), False),
    LeafSpec("mine", "uint8", (5,), True),
)
"""What one rank has of a state of four leaves: two parts of leaf 1, leaf 3, and a private one."""
TREE = {"!": "dict", "i": [[name, {"!": "leaf", "n": n, "as": "torch"}] for n, name in enumerate(["a", "w", "y", "z"])]}
PRIVATE = {"!": "dict", "i": [["mine", {"!": "leaf", "n": 0, "as": "torch"}]]}


def index_of(specs: tuple[LeafSpec, ...] = ROWS, leaf: tuple[int, ...] = (1, 1, 3, 4), tree_leaves: int = 4) -> Index:
    plan = plan_layout(specs, rank=2)
    packs = tuple(
        PackEntry(p.name, p.length, p.header_length, plan.header_digest(k, SAVE)) for k, p in enumerate(plan.packs)
    )
    starts = chunk_starts(plan.length, CHUNK)
    digests = np.random.default_rng(0).integers(0, 256, (int(starts[-1]), 16), dtype=np.uint8)
    return Index(
        2,
        SAVE,
        CHUNK,
        packs,
        specs,
        plan.pack,
        plan.offset,
        plan.length,
        starts,
        digests,
        PRIVATE,
        np.array(leaf, np.int64),
        tree_leaves,
    )


def test_parts_of_leaves_come_back_as_they_were() -> None:
    found = decode_index(encode_index(index_of(), ID, OURS), id=ID, rank=2, tree=TREE, repository=OURS)
    assert tuple(found.specs) == ROWS
    assert [found.specs[row] for row in range(4)] == list(ROWS)
    assert found.leaf is not None and found.leaf.tolist() == [1, 1, 3, 4]
    assert found.tree_leaves == 4


def test_a_row_of_a_table_says_what_part_it_is() -> None:
    table = decode_table(encode_index(index_of(), ID, OURS), id=ID, rank=2, repository=OURS)
    assert table.spec(1, "w") == ROWS[1]
    assert table.spec(2, "z") == ROWS[2]
    assert table.spec(3, "mine") == ROWS[3]


def test_a_rank_may_have_nothing_of_the_state() -> None:
    found = decode_index(encode_index(index_of(ROWS[3:], (4,)), ID, OURS), id=ID, rank=2, tree=TREE, repository=OURS)
    assert tuple(found.specs) == ROWS[3:]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda: index_of(leaf=(3, 1, 3, 4)), "not in the order"),
        (lambda: index_of(leaf=(1, 1, 4, 4)), "beyond its 4"),
        (lambda: index_of(leaf=(1, 1, 3, 5)), "private leaves are not in the order"),
        (lambda: index_of(tree_leaves=5, leaf=(1, 1, 3, 5)), "5 shared leaves, the manifest's tree has 4"),
        (lambda: index_of((replace(ROWS[0], offsets=(6, 0)), *ROWS[1:])), "reaches beyond its leaf"),
        (lambda: index_of((*ROWS[:3], replace(ROWS[3], whole=(6,), offsets=(0,)))), "a private row is less"),
    ],
)
def test_rows_that_contradict_each_other_are_refused(change: Callable[[], Index], why: str) -> None:
    data = encode_index(change(), ID, OURS)
    with pytest.raises(CorruptionError, match=why):
        decode_index(data, id=ID, rank=2, tree=TREE, repository=OURS)


def test_parts_of_one_leaf_lie_in_a_pack_under_names_of_their_own(tmp_path: Any) -> None:
    plan = plan_layout(ROWS)
    image = np.zeros(plan.nbytes, np.uint8)
    plan.stamp(image, SAVE)
    file = tmp_path / "pack.safetensors"
    file.write_bytes(image[: plan.packs[0].length].tobytes())
    with safetensors.safe_open(file, "np") as opened:
        assert sorted(opened.keys()) == ["mine", "w@2,0", "w@7,0", "z"]
    assert stored_name(ROWS[1]) == "w@7,0"
    with pytest.raises(DuplicatePath, match="w@2,0"):
        plan_layout((ROWS[0], ROWS[0]))


FORMS = [("float32", (8, 4)), ("int64", ()), ("bfloat16", (6, 6, 6)), ("uint8", (0,))]


def table_of(rows: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]) -> BoxTable:
    """Rows of (leaf, rank, origin, shape) over the leaves of `FORMS`."""
    names = sorted({name for name, _ in FORMS})
    return BoxTable(
        leaf=np.array([leaf for leaf, *_ in rows], np.int64),
        rank=np.array([rank for _, rank, *_ in rows], np.int64),
        row=np.arange(len(rows)),
        origin=np.array([place for *_, origin, _ in rows for place in origin], np.int64),
        shape=np.array([extent for *_, shape in rows for extent in shape], np.int64),
        bounds=np.cumsum([0, *(len(shape) for *_, shape in rows)]),
        dtypes=names,
        code=np.array([names.index(name) for name, _ in FORMS]),
        whole=np.array([extent for _, shape in FORMS for extent in shape]),
        ends=np.cumsum([0, *(len(shape) for _, shape in FORMS)]),
    )


@st.composite
def tables(draw: st.DrawFn) -> BoxTable:
    rows = []
    for leaf in sorted(draw(st.lists(st.integers(0, len(FORMS) - 1), max_size=8))):
        whole = FORMS[leaf][1]
        origin = tuple(draw(st.integers(0, extent)) for extent in whole)
        shape = tuple(draw(st.integers(0, extent - at)) for extent, at in zip(whole, origin, strict=True))
        rows.append((leaf, draw(st.integers(0, 3)), origin, shape))
    return table_of(rows)


def read(data: bytes, ranks: int = 4, leaves: int = len(FORMS)) -> BoxTable:
    return decode_boxes(data, id=ID, save_id=SAVE, ranks=ranks, leaves=leaves, repository=OURS)


@given(tables())
def test_a_table_of_boxes_comes_back_as_it_was(table: BoxTable) -> None:
    found = read(encode_boxes(table, ID, SAVE, OURS))
    for name in ("leaf", "rank", "row", "origin", "shape", "bounds", "code", "whole", "ends"):
        assert np.array_equal(getattr(found, name), getattr(table, name)), name
    assert found.of_ranks() == sorted(set(table.rank.tolist()))
    assert found.forms() == FORMS


TABLE = table_of([(0, 0, (0, 0), (4, 4)), (0, 3, (4, 0), (4, 4)), (1, 2, (), ())])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"leaf": np.array([0, 1, 0])}, "not in order"),
        ({"leaf": np.array([0, 0, 4])}, "beyond the 4"),
        ({"rank": np.array([0, 4, 0])}, "a rank beyond the 4"),
        ({"bounds": np.array([0, 2, 1, 4])}, "'shape.ends' does not divide"),
        ({"bounds": np.array([0, 2, 4, 5])}, "'shape.ends' does not divide"),
        ({"bounds": np.array([0, 1, 4, 4])}, "not as many dimensions as its leaf"),
        ({"ends": np.array([0, 2, 2, 5, 7])}, "'whole.ends' does not divide"),
        ({"origin": np.array([0])}, "more or fewer offsets"),
        ({"origin": np.array([0, 0, 5, 0])}, "reaches beyond its leaf"),
        ({"row": np.array([0])}, "different lengths"),
        ({"code": np.array([0])}, "not about the 4 leaves"),
        ({"code": np.array([0, 1, 2, 9])}, "a dtype that is not listed"),
        ({"dtypes": ["float32", "int64", "bfloat16", "a wish"]}, "which this version does not know"),
        ({"whole": np.array([2**60, 2**60, 6, 6, 6, 0])}, "more than 2\\^62 bytes"),
        ({"whole": np.array([2**63, 4, 6, 6, 6, 0], np.uint64)}, "a number beyond 2\\^62"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused(change: dict[str, Any], why: str) -> None:
    assert len(read(encode_boxes(TABLE, ID, SAVE, OURS))) == 3
    with pytest.raises(CorruptionError, match=why):
        read(encode_boxes(replace(TABLE, **change), ID, SAVE, OURS))


def test_the_table_of_another_save_or_another_place_is_refused() -> None:
    for data in (encode_boxes(TABLE, ID, "f" * 32, OURS), encode_boxes(TABLE, CheckpointId("gpt", 3, 501), SAVE, OURS)):
        with pytest.raises(CorruptionError, match="not the table of this checkpoint"):
            read(data)


def widths(data: bytes) -> dict[str, str]:
    return {name: entry.code for name, entry in parse_header(data, name="it").items()}


def test_columns_of_several_ranks_are_as_narrow_as_their_numbers() -> None:
    data = encode_boxes(TABLE, ID, SAVE, OURS)
    assert {"U8"} == set(widths(data).values())
    wide = replace(TABLE, row=np.array([0, 300, 70_000]), whole=np.array([8, 2**33, 6, 6, 6, 0]))
    found = widths(encode_boxes(wide, ID, SAVE, OURS))
    assert (found["row"], found["whole"], found["leaf"], found["rank"]) == ("U32", "U64", "U8", "U8")
    assert list(found)[:2] == ["whole", "row"], "the widest first: each column is aligned for its items"
    read_back = read(encode_boxes(wide, ID, SAVE, OURS))
    assert read_back.row.tolist() == [0, 300, 70_000] and read_back.whole.tolist()[1] == 2**33


def test_wide_columns_of_several_ranks_are_read_as_well() -> None:
    with patch.object(columns, "narrowest", lambda _, kinds: list(kinds)):
        data = encode_boxes(TABLE, ID, SAVE, OURS), encode_index(index_of(), ID, OURS)
    assert widths(data[0])["leaf"] == widths(data[1])["leaf"] == "U64"
    assert read(data[0]).leaf.tolist() == TABLE.leaf.tolist()
    assert tuple(decode_index(data[1], id=ID, rank=2, tree=TREE, repository=OURS).specs) == ROWS


@pytest.mark.parametrize("code", ["I8", "F32", "U64", "BOOL"])
def test_a_column_is_no_wider_than_it_may_be_and_of_whole_numbers(code: str) -> None:
    header = [(name, "U8", (0,)) for name, _, _ in COLUMNS if name != "rank"]
    data = build_header([("rank", code, (0,)), *header], {}, align=64)
    with pytest.raises(CorruptionError, match="'rank' is not a row of U32"):
        read(data)


def test_an_index_of_one_process_has_wide_columns_and_no_others() -> None:
    alone = replace(index_of(ROWS[2:3], (0,)), leaf=None, tree_leaves=None, private=None)
    data = encode_index(alone, ID, OURS)
    assert widths(data)["leaf"] == "U64" and widths(data)["dtype"] == "U16"

    def narrowly(*args: Any, save_id: str, narrow: bool) -> bytes:
        return columns.encode_columns(*args, save_id=save_id, narrow=True)

    with patch.object(index_module, "encode_columns", narrowly):
        narrow = encode_index(alone, ID, OURS)
    with pytest.raises(CorruptionError, match="not a row of U64"):
        decode_table(narrow, id=ID, rank=2, repository=OURS)
