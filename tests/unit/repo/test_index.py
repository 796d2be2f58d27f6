"""Index and manifest bytes: they come back as they were, every flipped bit is noticed, and a liar is caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.codec.chunk_map import chunk_starts
from tenuto.codec.digest import digest
from tenuto.engine.staging.buffer_layout import plan_layout
from tenuto.errors import CorruptionError, FormatTooNew
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import Index, IndexEntry, Manifest, PackEntry
from tenuto.repo.format.index import COLUMNS, ShapeRows, decode_index, decode_packs, encode_index
from tenuto.repo.format.manifest import Aborted, decode_manifest, encode_aborted, encode_manifest
from tenuto.repo.format.safetensors import build_header
from tenuto.state.encode.flattener import flatten

ID = CheckpointId("gpt", 3, 500)
OURS = "9" * 32
SAVE = "0123456789abcdef" * 2
FILE = f"{ID.directory}/rank-00000.index"
CHUNK = 1024

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
dtypes = st.sampled_from(["float32", "bfloat16", "float8_e4m3fn", "int64", "bool", "complex128", "numpy:<f16", "uint8"])


def tree_of(specs: tuple[LeafSpec, ...]) -> Any:
    return {"!": "dict", "i": [[spec.path, {"!": "leaf", "n": row, "as": "torch"}] for row, spec in enumerate(specs)]}


def index_of(specs: tuple[LeafSpec, ...], *, max_leaves: int = 500_000) -> Index:
    plan = plan_layout(specs, max_leaves=max_leaves)
    packs = tuple(
        PackEntry(p.name, p.length, p.header_length, plan.header_digest(k, SAVE)) for k, p in enumerate(plan.packs)
    )
    starts = chunk_starts(plan.length, CHUNK)
    digests = np.random.default_rng(0).integers(0, 256, (int(starts[-1]), 16), dtype=np.uint8)
    private = tree_of(tuple(spec for spec in specs if spec.private))
    return Index(0, SAVE, CHUNK, packs, specs, plan.pack, plan.offset, plan.length, starts, digests, private)


@st.composite
def indexes(draw: st.DrawFn) -> Index:
    rows = draw(st.lists(st.tuples(dtypes, shapes), max_size=6))
    shared = draw(st.integers(0, len(rows)))
    specs = tuple(LeafSpec(f"leaf{i}", name, shape, i >= shared) for i, (name, shape) in enumerate(rows))
    return index_of(specs, max_leaves=draw(st.sampled_from([1, 2, 100])))


def shared_tree(index: Index) -> Any:
    return tree_of(tuple(spec for spec in index.specs if not spec.private))


@settings(max_examples=50, derandomize=True, deadline=None)
@given(indexes())
def test_an_index_comes_back_as_it_was(index: Index) -> None:
    data = encode_index(index, ID, OURS)
    back = decode_index(data, id=ID, rank=0, tree=shared_tree(index), repository=OURS)
    for name in ("rank", "save_id", "chunk_bytes", "packs", "specs", "private"):
        assert getattr(back, name) == getattr(index, name)
    for name in ("pack", "offset", "length", "chunk_start", "digests"):
        np.testing.assert_array_equal(getattr(back, name), getattr(index, name))
        assert getattr(back, name).dtype == (np.uint8 if name == "digests" else np.int64)
    assert decode_packs(data, id=ID, rank=0, repository=OURS) == (SAVE, index.packs)
    assert encode_index(back, ID, OURS) == data
    assert encode_index(index, ID, OURS, ShapeRows.of(index.specs)) == data


@settings(max_examples=30, derandomize=True, deadline=None)
@given(indexes(), st.data())
def test_a_damaged_index_that_reaches_the_parser_is_an_error_or_reads_within_bounds(
    index: Index, data: st.DataObject
) -> None:
    good = encode_index(index, ID, OURS)
    at = data.draw(st.integers(0, len(good) - 1))
    bad = data.draw(
        st.sampled_from(
            [good[:at], good[:at] + bytes([good[at] ^ (1 << data.draw(st.integers(0, 7)))]) + good[at + 1 :]]
        )
    )
    try:
        back = decode_index(bad, id=ID, rank=0, tree=shared_tree(index), repository=OURS)
    except CorruptionError as error:
        assert error.subject == FILE
        return
    for row in range(len(back.specs)):
        assert back.offset[row] + back.length[row] <= back.packs[back.pack[row]].length
        assert back.length[row] == back.specs[row].nbytes


def test_an_index_of_a_flattened_state_names_its_leaves_again() -> None:
    """Shared leaves by the manifest's tree, private ones by the index's own."""
    array = np.arange(6.0).reshape(2, 3)
    state = {"a/b": array, "tied": [array, np.float32(1)], 3: {"#x": np.zeros((0, 2))}}
    flattened = flatten(state, private={"rng": np.arange(4), "blob": b"x" * 5000})
    assert [spec.private for spec in flattened.specs] == [False, False, True, True]
    index = replace(index_of(flattened.specs), private=flattened.private)
    back = decode_index(encode_index(index, ID, OURS), id=ID, rank=0, tree=flattened.tree, repository=OURS)
    assert back.specs == flattened.specs
    assert back.private == flattened.private


def rebuilt(index: Index, **changes: Any) -> bytes:
    """The index's file with columns replaced, which no digest has to vouch for here."""
    data = encode_index(index, ID, OURS)
    columns = {}
    at = 8 + int.from_bytes(data[:8], "little")
    from tenuto.repo.format.safetensors import parse_header

    header = parse_header(data, name="x")
    for name, _, kind in COLUMNS:
        entry = header[name]
        columns[name] = np.frombuffer(data, dtype=kind, count=entry.shape[0], offset=entry.start).copy()
    assert at
    for name, change in changes.items():
        name = name.replace("__", ".")
        columns[name] = change(columns[name]) if callable(change) else change
    entries = [(name, code, (columns[name].size,)) for name, code, _ in COLUMNS]
    parts = [columns[name].astype(kind).tobytes() for name, _, kind in COLUMNS]
    return build_header(entries, {}, align=64) + b"".join(parts)


def with_head(**changes: Any) -> Callable[[Any], Any]:
    def change(column: Any) -> Any:
        head = canonical_json.loads(column.tobytes())
        for key, value in changes.items():
            head[key] = value(head[key]) if callable(value) else value
        return np.frombuffer(canonical_json.dumps(head), dtype=np.uint8)

    return change


def first(value: int, row: int = 0) -> Callable[[Any], Any]:
    def change(column: Any) -> Any:
        column[row] = value
        return column

    return change


LIES: dict[str, dict[str, Any]] = {
    "an offset before the header's end": {"offset": first(0)},
    "an offset beyond the pack": {"offset": first(1 << 40)},
    "an offset beyond 64 bits": {"offset": first(2**64 - 1)},
    "a length that dtype and shape do not give": {"length": first(61)},
    "a length beyond 64 bits": {"length": first(2**64 - 8)},
    "two leaves at one place": {"offset": lambda column: np.full_like(column, column[0])},
    "a hole": {"head": with_head(packs=lambda packs: [{**packs[0], "length": packs[0]["length"] + 8}])},
    "a pack shorter than its leaves": {
        "head": with_head(packs=lambda packs: [{**packs[0], "length": packs[0]["length"] - 8}])
    },
    "a header longer than the pack": {"head": with_head(packs=lambda packs: [{**packs[0], "header": 1 << 50}])},
    "a pack number that is not listed": {"pack": first(7)},
    "a dtype number that is not listed": {"dtype": first(9)},
    "a dtype that nobody knows": {"head": with_head(dtypes=["float32", "float12"])},
    "a dtype that holds objects": {"head": with_head(dtypes=["float32", "numpy:|O8"])},
    "a dtype that is a program": {"head": with_head(dtypes=["float32", "numpy:" + "i4," * 99])},
    "a shape of too many elements": {"shape": lambda column: np.full_like(column, 2**33)},
    "a shape whose product wraps round": {
        "shape": lambda column: np.array([2**32, 2**32, 3], dtype=np.uint64)[: column.size]
    },
    "a dimension beyond 64 bits": {"shape": first(2**64 - 1)},
    "shape ends that fall": {"shape__ends": first(3)},
    "shape ends that go beyond and come back": {"shape__ends": first(4)},
    "shape ends beyond the column": {"shape__ends": first(2**63, -1)},
    "fewer digests than chunks": {"digests": lambda column: column[:-16]},
    "a digest cut short": {"digests": lambda column: column[:-1]},
    "digest ends that do not fit the lengths": {"digests__ends": first(0)},
    "leaves out of order": {"leaf": lambda column: column[::-1].copy()},
    "a row too many": {"pack": lambda column: np.append(column, 0)},
    "another number of shared leaves": {"head": with_head(shared=1)},
    "a path that leads out": {
        "head": with_head(packs=lambda packs: [{**packs[0], "name": "../rank-00000.safetensors"}])
    },
    "an absolute path": {"head": with_head(packs=lambda packs: [{**packs[0], "name": "/etc/passwd"}])},
    "the manifest as a pack": {"head": with_head(packs=lambda packs: [{**packs[0], "name": "manifest.json"}])},
    "a pack twice": {"head": with_head(packs=lambda packs: packs * 2)},
    "another rank": {"head": with_head(rank=1)},
    "another checkpoint": {"head": with_head(path="runs/gpt/a0003/step-00000501/rank-00000.index")},
    "chunks of no bytes": {"head": with_head(chunk_bytes=0)},
    "chunks of half a byte": {"head": with_head(chunk_bytes=0.5)},
    "no head": {"head": np.zeros(0, dtype=np.uint8)},
    "a head that is not an object": {"head": np.frombuffer(b"[]", dtype=np.uint8)},
    "a private leaf under a shared one's path": {
        "private": np.frombuffer(canonical_json.dumps(tree_of((LeafSpec("x", "int64", ()),))), dtype=np.uint8)
    },
    "a private tree without kinds": {"private": np.frombuffer(b'{"x":1}', dtype=np.uint8)},
    "a private tree whose kind is a list": {"private": np.frombuffer(b'{"!":[]}', dtype=np.uint8)},
    "a private tree with a leaf in no number": {"private": np.frombuffer(b'{"!":"leaf","n":-1}', dtype=np.uint8)},
}


@pytest.mark.parametrize("lie", LIES)
def test_i10_an_index_that_lies_is_refused(lie: str) -> None:
    specs = (LeafSpec("x", "float32", (3, 5)), LeafSpec("y", "int64", (2,)))
    index = index_of(specs)
    assert decode_index(rebuilt(index), id=ID, rank=0, tree=tree_of(specs), repository=OURS).specs == specs
    with pytest.raises(CorruptionError) as caught:
        decode_index(rebuilt(index, **LIES[lie]), id=ID, rank=0, tree=tree_of(specs), repository=OURS)
    assert caught.value.subject == FILE


def test_a_newer_format_says_what_reads_it() -> None:
    specs = (LeafSpec("x", "float32", (3, 5)),)
    with pytest.raises(FormatTooNew) as caught:
        decode_index(
            rebuilt(index_of(specs), head=with_head(format=3)), id=ID, rank=0, tree=tree_of(specs), repository=OURS
        )
    assert "the Tenuto that wrote it, or a newer one" in str(caught.value)


MANIFEST = Manifest(
    ID,
    SAVE,
    tree_of((LeafSpec("x", "float32", (3, 5)),)),
    (IndexEntry("rank-00000.index", 1234, digest(b"")),),
    "ab" * 32,
    60,
    1,
    CHUNK,
    parent=CheckpointId("other", 9, 7),
    metrics={"loss": float("inf"), "accuracy": 0.5},
    progress={"step": 500, "epoch": 1},
    environment={"python": "3.13"},
    certificate={"exact": True},
    created="2026-01-01T00:00:00Z",
)


def test_a_manifest_comes_back_as_it_was() -> None:
    assert decode_manifest(encode_manifest(MANIFEST, OURS), ID, OURS) == MANIFEST
    assert encode_manifest(MANIFEST, OURS, canonical_json.spell(MANIFEST.tree)) == encode_manifest(MANIFEST, OURS)
    nan = replace(MANIFEST, metrics={"loss": float("nan")})
    assert encode_manifest(decode_manifest(encode_manifest(nan, OURS), ID, OURS), OURS) == encode_manifest(nan, OURS)  # type: ignore[arg-type]


def test_an_aborted_mark_is_told_from_a_manifest() -> None:
    mark = Aborted(ID, SAVE, "a reason " * 20)
    assert decode_manifest(encode_aborted(mark, OURS), ID, OURS) == mark


@pytest.mark.parametrize(
    "data", [encode_manifest(MANIFEST, OURS), encode_aborted(Aborted(ID, SAVE, "why"), OURS)], ids=["manifest", "mark"]
)
def test_every_flipped_bit_and_every_cut_of_a_manifest_is_noticed(data: bytes) -> None:
    for at in range(len(data)):
        for bit in range(8):
            with pytest.raises(CorruptionError):
                decode_manifest(data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :], ID, OURS)
        with pytest.raises(CorruptionError):
            decode_manifest(data[:at], ID, OURS)


def sealed(**changes: Any) -> bytes:
    body = {
        k: v
        for k, v in canonical_json.unseal(encode_manifest(MANIFEST, OURS), name=ID.manifest).items()
        if k != "digest"
    }
    body.update(changes)
    return canonical_json.seal({k: v for k, v in body.items() if v is not ...})


ENTRY = {"digest": "00" * 16, "length": 100, "name": "rank-00000.index"}


@pytest.mark.parametrize(
    "changes",
    [
        {"path": "runs/gpt/a0004/step-00000500/manifest.json"},
        {"step": 501},
        {"attempt": 4},
        {"run": "other"},
        {"kind": "note"},
        {"save_id": "../../../etc"},
        {"save_id": ...},
        {"tree": ...},
        {"indexes": []},
        {"indexes": [{**ENTRY, "name": "../rank-00000.index"}]},
        {"indexes": [{**ENTRY, "name": "begin.json"}]},
        {"indexes": [{**ENTRY, "length": -1}]},
        {"indexes": [{**ENTRY, "length": 1.5}]},
        {"indexes": [{**ENTRY, "length": True}]},
        {"indexes": [{**ENTRY, "digest": "00"}]},
        {"indexes": [ENTRY, ENTRY]},
        {"indexes": [7]},
        {"bytes": "60"},
        {"leaves": -1},
        {"chunk_bytes": 0},
        {"chunk_bytes": 1 << 40},
        {"metrics": {"loss": "low"}},
        {"metrics": {"loss": {"!": "int", "v": "1" + "0" * 400}}},
        {"metrics": []},
        {"progress": 5},
        {"parent": {"run": "gpt", "attempt": 4, "step": 1}},
        {"parent": {"run": "../x", "attempt": 1, "step": 1}},
        {"parent": {"run": "gpt", "attempt": 0, "step": 1}},
        {"parent": "gpt/a0001/1"},
        {"format": "1"},
        {"format": ...},
    ],
    ids=lambda changes: str(changes)[:70],
)
def test_i10_a_manifest_that_lies_is_refused(changes: dict[str, Any]) -> None:
    assert decode_manifest(sealed(), ID, OURS) == MANIFEST
    with pytest.raises(CorruptionError) as caught:
        decode_manifest(sealed(**changes), ID, OURS)
    assert caught.value.subject == ID.manifest


def test_a_manifest_of_a_newer_format_is_told_as_such() -> None:
    with pytest.raises(FormatTooNew):
        decode_manifest(sealed(format=3), ID, OURS)


WORDS = {
    "an offset before the header's end": "the leaves in rank-00000.safetensors overlap, leave a hole or do not end",
    "an offset beyond 64 bits": "an offset is beyond 2^62",
    "a length that dtype and shape do not give": "leaf 0 has 61 bytes where dtype and shape give 60",
    "a length beyond 64 bits": "a length is beyond 2^62",
    "a hole": "the leaves in rank-00000.safetensors overlap, leave a hole or do not end where it ends",
    "a header longer than the pack": f"'header' is {1 << 50}, which is not within 8 and ",
    "a pack number that is not listed": "a row lies in a data file that the index does not list",
    "a dtype number that is not listed": "a row has a dtype that the index does not list",
    "a dtype that nobody knows": "has the dtype 'float12', which this version does not know",
    "a dtype that is a program": f"has the dtype {('numpy:' + 'i4,' * 99)[:80]!r}, which this version does not know",
    "a shape whose product wraps round": "the shape of a leaf gives more than 2^62 bytes",
    "a dimension beyond 64 bits": "a dimension is beyond 2^62",
    "shape ends that fall": "leaf 0 has 60 bytes where dtype and shape give 120",
    "shape ends that go beyond and come back": "the column 'shape.ends' does not divide the 3 values that there are",
    "shape ends beyond the column": "an end in 'shape.ends' is beyond 2^62",
    "fewer digests than chunks": "the column 'digests.ends' does not divide the 1 values that there are",
    "a digest cut short": "the digests are not a multiple of 16 bytes",
    "digest ends that do not fit the lengths": "a leaf does not have one digest for each of its chunks",
    "leaves out of order": "the leaves are not in the order of the state",
    "a row too many": "the column 'pack' has 3 rows where there are 2 leaves",
    "another number of shared leaves": "has 1 shared leaves, the manifest's tree has 2",
    "a path that leads out": f"{FILE} names '../rank-00000.safetensors', which no object of a checkpoint can be called",
    "a pack twice": "names a data file twice",
    "another rank": "is not the index of this rank and checkpoint",
    "another checkpoint": "is not the index of this rank and checkpoint",
    "chunks of no bytes": "'chunk_bytes' is 0, which is not within 1 and ",
    "no head": "the column 'head': ",
    "a head that is not an object": "the column 'head' is not an object",
    "a private leaf under a shared one's path": "has a private leaf under the path of another leaf",
    "a private tree without kinds": "the private tree is not what a save writes: ",
}


@pytest.mark.parametrize("lie", WORDS)
def test_a_lie_of_an_index_is_put_into_words(lie: str) -> None:
    specs = (LeafSpec("x", "float32", (3, 5)), LeafSpec("y", "int64", (2,)))
    with pytest.raises(CorruptionError) as caught:
        decode_index(rebuilt(index_of(specs), **LIES[lie]), id=ID, rank=0, tree=tree_of(specs), repository=OURS)
    assert caught.value.message.startswith((f"{FILE}: {WORDS[lie]}", WORDS[lie]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step": 501}, "names another checkpoint than its own"),
        ({"tree": ...}, "has no tree"),
        ({"indexes": []}, "names 0 indexes"),
        ({"indexes": [ENTRY, ENTRY]}, "names an index twice"),
        ({"indexes": [7]}, "an index entry is not an object"),
        ({"indexes": [{**ENTRY, "length": 7}]}, "'length' is 7, which is not within 8 and "),
        ({"chunk_bytes": 0}, f"'chunk_bytes' is 0, which is not within 1 and {1 << 30}"),
        ({"metrics": {"loss": "low"}}, "a metric is not a number: "),
        ({"parent": {"run": "gpt", "attempt": 4, "step": 1}}, "has the parent gpt/a0004/1, which is not lower than"),
        ({"save_id": "ab"}, "'save_id' is not 32 hexadecimal digits"),
        ({"content": "ab"}, "'content' is not 64 hexadecimal digits"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_lie_of_a_manifest_is_put_into_words(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CorruptionError) as caught:
        decode_manifest(sealed(**changes), ID, OURS)
    assert caught.value.message.startswith(f"{ID.manifest}: {words}")


def test_the_parent_of_a_manifest_may_be_of_its_own_attempt() -> None:
    own = {"run": "gpt", "attempt": 3, "step": 1}
    found = decode_manifest(sealed(parent=own), ID, OURS)
    assert isinstance(found, Manifest) and found.parent == CheckpointId("gpt", 3, 1)


def test_an_index_is_spelled_as_the_format_says() -> None:
    """Column by column: other readers rely on it."""
    specs = (LeafSpec("x", "float32", (3, 5)), LeafSpec("y", "int64", (), True))
    index = index_of(specs)
    data = encode_index(index, ID, OURS)
    from tenuto.repo.format.safetensors import parse_header

    header = parse_header(data, name="x")
    assert header.metadata == {"tenuto.save_id": SAVE}
    assert header.length % 64 == 0
    assert [(name, header[name].code) for name in header] == [(name, code) for name, code, _ in COLUMNS]
    head = canonical_json.loads(data[header["head"].start : header["head"].stop])
    (pack,) = index.packs
    assert head == {
        "chunk_bytes": CHUNK,
        "dtypes": ["float32", "int64"],
        "format": 1,
        "kind": "index",
        "packs": [
            {"digest": pack.header_digest.hex(), "header": pack.header_length, "length": pack.length, "name": pack.name}
        ],
        "path": FILE,
        "rank": 0,
        "repository": OURS,
        "save_id": SAVE,
        "shared": 1,
    }


def test_a_table_says_what_each_row_is() -> None:
    from tenuto.repo.format.index import decode_table

    specs = (LeafSpec("x", "float32", (3, 5)), LeafSpec("y", "int64", ()), LeafSpec("z", "int64", (4,), True))
    table = decode_table(encode_index(index_of(specs), ID, OURS), id=ID, rank=0, repository=OURS)
    assert len(table) == 3
    assert [table.spec(row, spec.path) for row, spec in enumerate(specs)] == list(specs)
    assert (table.shared, table.name, table.rank, table.save_id) == (2, FILE, 0, SAVE)


def test_a_manifests_tree_that_no_save_wrote_is_told() -> None:
    data = encode_index(index_of((LeafSpec("x", "float32", (3, 5)),)), ID, OURS)
    with pytest.raises(CorruptionError) as caught:
        decode_index(data, id=ID, rank=0, tree={"x": 1}, repository=OURS)
    assert caught.value.message.startswith(f"{FILE}: the manifest's tree is not what a save writes: ")
