"""Where encoded chunks lie: the columns come back as they were, a liar is caught, and no changed number gives other
bytes than were saved."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tenuto
from tenuto.codec.chunk_map import chunk_sizes, chunk_starts
from tenuto.codec.digest import digest
from tenuto.codec.registry import codec
from tenuto.engine.read.choose import restore_checkpoint
from tenuto.errors import CorruptionError, FormatTooNew, TenutoError
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import Index, IndexEntry, PackEntry, StoredChunks
from tenuto.repo.format.columns import decode_columns, encode_columns
from tenuto.repo.format.index import COLUMNS, ENCODED_COLUMNS, decode_index, encode_index
from tenuto.repo.format.manifest import encode_manifest
from tenuto.repo.format.objects import checkpoint_json
from tenuto.repo.format.stored_chunks import MAX_CHAIN, MAX_CHUNK_BYTES, RAW
from tenuto.repo.repository import Repo
from tenuto.state.restore.match import match_state
from tenuto.store.registry import open_store

ID = CheckpointId("gpt", 3, 500)
EARLIER = CheckpointId("gpt", 3, 400)
OURS = "9" * 32
SAVE = "0123456789abcdef" * 2
FILE = f"{ID.directory}/rank-00000.index"
HEAD = 128
MIB = 1 << 20
SPECS = (LeafSpec("x", "uint8", (250,)), LeafSpec("y", "uint8", (100,)), LeafSpec("z", "uint8", (0,)))
TREE: Any = {
    "!": "dict",
    "i": [[spec.path, {"!": "leaf", "n": row, "as": "numpy"}] for row, spec in enumerate(SPECS)],
}


def index_of(stored: StoredChunks, packs: tuple[PackEntry, ...], **changes: Any) -> Index:
    length = np.array([spec.nbytes for spec in SPECS])
    starts = chunk_starts(length, 100)
    digests = np.array([[number] * 16 for number in range(int(starts[-1]))], np.uint8)
    nowhere = np.zeros(len(SPECS), np.int64)
    return replace(
        Index(0, SAVE, 100, packs, SPECS, nowhere, nowhere, length, starts, digests, None, stored=stored), **changes
    )


def table(*rows: tuple[Any, ...]) -> StoredChunks:
    """rows: pack, offset, stored, raw, codec, base, digest."""
    columns = [np.array([row[column] for row in rows], np.int64) for column in range(6)]
    digests = np.array([[row[6]] * 16 for row in rows], np.uint8)
    return StoredChunks((RAW, "zstd", "delta4-zstd"), *columns, digests)


def valid() -> Index:
    """Chunks of 100, 100, 50 and 100 bytes: raw, encoded, the same stored bytes as another one's, and a difference to
    one of an earlier checkpoint that is itself a difference."""
    stored = table(
        (0, HEAD, 100, 100, 0, -1, 0),
        (0, HEAD + 100, 40, 100, 1, -1, 70),
        (1, 4096, 50, 50, 0, -1, 2),
        (0, HEAD + 140, 10, 100, 2, 4, 71),
        (1, 4146, 20, 100, 2, 5, 72),
        (1, 4200, 100, 100, 0, -1, 73),
    )
    packs = (
        PackEntry("rank-00000.pack", HEAD + 150, HEAD, bytes(16)),
        PackEntry("rank-00000.pack", 9000, 4096, bytes(16), at=EARLIER),
    )
    return index_of(stored, packs)


def encoded(index: Index) -> bytes:
    return encode_index(index, ID, OURS)


def decoded(data: bytes) -> Index:
    return decode_index(data, id=ID, rank=0, tree=TREE, repository=OURS)


def rebuilt(data: bytes, *, kinds: Any = ENCODED_COLUMNS, **changes: Any) -> bytes:
    """The index's file with columns replaced, which no digest has to vouch for here."""
    columns: dict[str, Any] = dict(decode_columns(data, ENCODED_COLUMNS, narrow=True, name="x", what="x"))
    for name, change in changes.items():
        name = name.replace("__", ".")
        columns[name] = change(columns[name].copy()) if callable(change) else change
    columns = {name: columns.get(name, np.zeros(len(SPECS), np.uint64)) for name, _, _ in kinds}
    return encode_columns(columns, kinds, save_id=SAVE)


def at(row: int, value: int) -> Callable[[Any], Any]:
    def change(column: Any) -> Any:
        column = column.astype(np.uint64)
        column[row] = value
        return column

    return change


def with_head(**changes: Any) -> Callable[[Any], Any]:
    def change(column: Any) -> Any:
        head = canonical_json.loads(column.tobytes())
        for key, value in changes.items():
            head[key] = value(head[key]) if callable(value) else value
        return np.frombuffer(canonical_json.dumps(head), np.uint8)

    return change


def pack(number: int, **changes: Any) -> dict[str, Any]:
    def change(packs: Any) -> Any:
        packs[number] |= changes
        return packs

    return {"head": with_head(packs=change)}


def cut(column: Any) -> Any:
    return column[:-1]


LIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"the column {name} is short": ("one value for each", {name.replace(".", "__"): cut})
        for name in ("chunk.base", "chunk.offset", "chunk.raw", "chunk.stored", "chunk.codec", "chunk.digests")
    },
    "a row too many of digests": ("one value for each", {"chunk__digests": lambda c: np.append(c, c[:16])}),
    "fewer chunks than the rows have": (
        "its rows have 4",
        {
            f"chunk__{name}": lambda c, n=name: c[: 48 if n == "digests" else 3]
            for name in ("base", "offset", "raw", "stored", "pack", "codec", "digests")
        },
    ),
    **{
        f"{name} beyond 2^62": ("beyond 2", {f"chunk__{name}": at(0, 2**64 - 1)})
        for name in ("offset", "raw", "stored", "base")
    },
    "another length than the row's": ("its row gives it", {"chunk__raw": at(0, 99)}),
    "no byte where nothing is a row's": ("no byte", {"chunk__raw": at(5, 0)}),
    "a chunk of 100 bytes that claims 17 MiB": ("more than 16777216", {"chunk__raw": at(4, MAX_CHUNK_BYTES + 1)}),
    "a chunk that claims 2^61 bytes": ("more than 16777216", {"chunk__raw": at(4, 2**61)}),
    "a codec that is not listed": ("does not list", {"chunk__codec": at(1, 3)}),
    "codecs that are no list": ("codecs", {"head": with_head(codecs="raw")}),
    "a codec twice": ("one twice", {"head": with_head(codecs=["raw", "zstd", "zstd"])}),
    "a codec that is a number": ("is not a short text", {"head": with_head(codecs=["raw", "zstd", 3])}),
    "a codec without a name": ("is not a short text", {"head": with_head(codecs=["raw", "zstd", ""])}),
    "a codec of 10,000 letters": ("is not a short text", {"head": with_head(codecs=["raw", "zstd", "x" * 10_000])}),
    "too many codecs": ("too many", {"head": with_head(codecs=[str(number) for number in range(1001)])}),
    "a pack that is not listed": ("a data file that the index does not list", {"chunk__pack": at(0, 2)}),
    "an offset in the pack's header": ("outside of its data file", {"chunk__offset": at(5, 4095)}),
    "an offset behind the pack": ("outside of its data file", {"chunk__offset": at(5, 2**50)}),
    "stored bytes that end behind the pack": ("outside of its data file", {"chunk__stored": at(4, 9001 - 4146)}),
    "no stored byte": ("outside of its data file", {"chunk__stored": at(4, 0)}),
    "a hole in its own pack": ("leave a hole", {"chunk__offset": at(3, HEAD + 139)}),
    "an overlap in its own pack": ("overlap", {"chunk__stored": at(1, 41)}),
    "two lengths at one place": ("at one place", {"chunk__offset": at(5, 4146)}),
    "two digests at one place": (
        "at one place",
        {"chunk__offset": at(5, 4146), "chunk__stored": at(4, 100), "chunk__digests": at(5 * 16, 9)},
    ),
    "its own pack ends earlier": ("outside of its data file", pack(0, length=HEAD + 149)),
    "its own pack ends later": ("do not end where it ends", pack(0, length=HEAD + 151)),
    "its own pack begins earlier": ("leave a hole", pack(0, header=HEAD - 1)),
    "an own pack without chunks": (
        "do not end where it ends",
        {
            "head": with_head(
                packs=lambda packs: [*packs, {"name": "x.pack", "length": 300, "header": 200, "digest": "0" * 32}]
            )
        },
    ),
    "raw, and of another length there": ("another length", {"chunk__codec": at(1, 0)}),
    "raw, and of another digest there": ("another digest", {"chunk__digests": at(2 * 16, 3)}),
    "a base that is not listed": ("one that the index does not list", {"chunk__base": at(3, 7)}),
    "a base of another length": ("one of another length", {"chunk__base": at(3, 3)}),
    "its own base": ("one upon the other", {"chunk__base": at(3, 4)}),
    "bases in a circle": ("one upon the other", {"chunk__base": at(5, 4)}),
    "a pack twice": ("a data file twice", {"head": with_head(packs=lambda packs: [packs[0], packs[0]])}),
    "another checkpoint's pack twice": (
        "a data file twice",
        {"head": with_head(packs=lambda packs: [*packs, packs[1]])},
    ),
    "a pack in a run that leads out": ("not a checkpoint", pack(1, at={**checkpoint_json(ID), "run": "../../x"})),  # type: ignore[dict-item]
    "a pack in a run of a path": ("not a checkpoint", pack(1, at={**checkpoint_json(ID), "run": "/etc"})),  # type: ignore[dict-item]
    "a pack in no attempt": ("attempt", pack(1, at={**checkpoint_json(ID), "attempt": 0})),  # type: ignore[dict-item]
    "a pack in half a step": ("step", pack(1, at={**checkpoint_json(ID), "step": 0.5})),  # type: ignore[dict-item]
    "a pack nowhere": ("", pack(1, at=None)),
    "a pack in a text": ("", pack(1, at="gpt/3/400")),
    "a pack of its own as another's": ("its own data file", pack(1, at=checkpoint_json(ID))),
    "a name that leads out": ("", pack(1, name="../step-00000001/rank-00000.pack")),
    "the manifest as a pack": ("", pack(1, name="manifest.json")),
    "another repository's": ("", {"head": with_head(repository="8" * 32)}),
    "format 1": ("the columns of another format", {"head": with_head(format=1)}),
}


@pytest.mark.parametrize("lie", LIES)
def test_i10_an_encoded_index_that_lies_is_refused(lie: str) -> None:
    words, changes = LIES[lie]
    good = encoded(valid())
    decoded(rebuilt(good))
    with pytest.raises(CorruptionError) as caught:
        decoded(rebuilt(good, **changes))
    assert caught.value.subject == FILE
    assert words in caught.value.message


def test_the_columns_of_one_format_under_the_head_of_the_other() -> None:
    with pytest.raises(CorruptionError, match="the columns of another format"):
        decoded(rebuilt(encoded(valid()), kinds=COLUMNS))


def test_places_of_rows_beside_those_of_chunks() -> None:
    with pytest.raises(CorruptionError, match="does not have the columns"):
        decoded(rebuilt(encoded(valid()), kinds=(("offset", "U64", "<u8"), *ENCODED_COLUMNS)))


@pytest.mark.parametrize("links", [1, MAX_CHAIN, MAX_CHAIN + 1, 50_000])
def test_a_chain_of_bases_ends(links: int) -> None:
    own = [(0, HEAD, 350, 100, 1, -1, 0)] * 3
    chain = [(1, 4096 + number, 1, 100, 2, 5 + number, 0) for number in range(links)]
    rows = [own[0], own[0], (0, HEAD, 350, 50, 1, -1, 0), (0, HEAD, 350, 100, 2, 4, 0), *chain]
    rows[-1] = (*rows[-1][:5], -1, 0)
    packs = (
        PackEntry("rank-00000.pack", HEAD + 350, HEAD, bytes(16)),
        PackEntry("rank-00000.pack", 1 << 20, 4096, bytes(16), at=EARLIER),
    )
    data = encoded(index_of(table(*rows), packs))
    if links <= MAX_CHAIN:
        assert decoded(data).stored is not None
        return
    with pytest.raises(CorruptionError, match="more than 64 others"):
        decoded(data)


def test_a_chunk_stored_as_it_is_may_be_longer_than_what_is_encoded() -> None:
    """All its bytes are in its data file."""
    specs = (LeafSpec("x", "uint8", (2 * MAX_CHUNK_BYTES,)), *SPECS[1:])
    length = np.array([spec.nbytes for spec in specs])
    changes = {
        "chunk_bytes": 2 * MAX_CHUNK_BYTES,
        "specs": specs,
        "length": length,
        "chunk_start": chunk_starts(length, 2 * MAX_CHUNK_BYTES),
        "digests": np.zeros((2, 16), np.uint8),
    }
    packs = (PackEntry("rank-00000.pack", HEAD + 2 * MAX_CHUNK_BYTES + 100, HEAD, bytes(16)),)
    rows = [
        (0, HEAD, 2 * MAX_CHUNK_BYTES, 2 * MAX_CHUNK_BYTES, 0, -1, 0),
        (0, HEAD + 2 * MAX_CHUNK_BYTES, 100, 100, 0, -1, 0),
    ]
    assert decoded(encoded(index_of(table(*rows), packs, **changes))).stored is not None


# -- what is valid comes back ------------------------------------------------------------------------------------------


@st.composite
def tables(draw: st.DrawFn) -> Index:
    """Any order in the packs, chunks that share their stored bytes, chains to what lies elsewhere."""
    sizes = chunk_sizes(np.array([spec.nbytes for spec in SPECS]), 100).tolist()
    extra = draw(st.integers(0, 6))
    raws = [*sizes, *([100] * extra)]
    order = draw(st.permutations(range(len(raws))))
    rows: list[Any] = [None] * len(raws)
    ends = {0: HEAD, 1: HEAD, 2: 4096}
    for number in order:
        codec = draw(st.integers(0, 2))
        stored = raws[number] if codec == 0 else draw(st.integers(1, 2 ** draw(st.integers(0, 40))))
        where = draw(st.integers(0, 2))
        base = -1
        if codec == 2:
            below = [one for one in range(number + 1, len(raws)) if raws[one] == raws[number]]
            base = draw(st.sampled_from([-1, *below]))
        name = number if codec == 0 and number < len(sizes) else draw(st.integers(0, 255))
        rows[number] = (where, ends[where], stored, raws[number], codec, base, name)
        ends[where] += stored
    used = [number for number in range(3) if any(row[0] == number for row in rows)]
    entries = [
        PackEntry("rank-00000.pack", ends[0], HEAD, bytes(16)),
        PackEntry("rank-00000.01.pack", ends[1], HEAD, bytes(16)),
        PackEntry("rank-00000.pack", ends[2] + draw(st.integers(0, 99)), 4096, bytes(16), at=EARLIER),
    ]
    rows = [(used.index(row[0]), *row[1:]) for row in rows]
    return index_of(table(*rows), tuple(entries[number] for number in used))


@settings(max_examples=100, derandomize=True, deadline=None)
@given(tables())
def test_a_table_of_chunks_comes_back_as_it_was(index: Index) -> None:
    data = encoded(index)
    back = decoded(data)
    assert back.packs == index.packs
    assert back.stored is not None and index.stored is not None
    assert back.stored.codecs == index.stored.codecs
    for name in ("pack", "offset", "stored", "raw", "codec", "base", "digests"):
        np.testing.assert_array_equal(getattr(back.stored, name), getattr(index.stored, name))
    assert encoded(back) == data


# -- changed numbers in a whole repository -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Repo, dict[str, bytes]]:
    """A repository with differences, and what its last checkpoint holds."""
    where = tmp_path_factory.mktemp("trained")
    Repo.create_or_open(open_store(where), chunk_bytes=4096)
    source = np.random.default_rng(1)
    state = {"w": source.random(5600, np.float32), "still": source.random(4000, np.float32), "zeros": np.zeros(4800)}
    with tenuto.Checkpointer(
        where, state, save=tenuto.every(steps=1), keep=tenuto.keep.all(), encoding=tenuto.Encoding(delta=8)
    ) as ckpt:
        for _ in ckpt.steps(4):
            state["w"] *= np.float32(1.0001)
    return Repo.open(open_store(where)), {name: value.tobytes() for name, value in state.items()}


LAST = CheckpointId("main", 1, 4)


def restored(repo: Repo, data: bytes) -> dict[str, bytes]:
    """Returns what LAST holds by this index, for which its manifest vouches."""
    manifest = repo.manifest(LAST)
    entry = IndexEntry("rank-00000.index", len(data), digest(data))
    liar = Repo.open(open_store(repo.url))
    name, path = LAST.manifest, Path(repo.url)
    objects = {
        name: encode_manifest(replace(manifest, indexes=(entry,)), repo.id),
        f"{LAST.directory}/{entry.name}": data,
    }
    before = {one: (path / one).read_bytes() for one in objects}
    try:
        for one, content in objects.items():
            (path / one).write_bytes(content)
        found = restore_checkpoint(
            liar,
            LAST,
            lambda manifest, leaves: match_state(
                manifest.tree, leaves.private, leaves.specs, private_into={"data": {}, "random": {}}
            ),
        )
    finally:
        for one, content in before.items():
            (path / one).write_bytes(content)
    return {key: value.tobytes() for key, value in found.state.items()}


def changed(data: bytes, source: random.Random) -> tuple[str, bytes]:
    """Returns the index with one number changed, and what was done."""
    columns = decode_columns(data, ENCODED_COLUMNS, narrow=True, name="x", what="x")
    name = source.choice([kind[0] for kind in ENCODED_COLUMNS if kind[0] not in ("head", "private")])
    column = columns[name].astype(np.uint64)
    row = source.randrange(column.size)
    old = int(column[row])
    most = 255 if name in ("chunk.digests", "digests") else 65535 if name in ("dtype", "chunk.codec") else 2**32 - 1
    value = source.choice(
        [
            0,
            1,
            old + 1,
            max(old - 1, 0),
            old ^ (1 << source.randrange(24)),
            source.randrange(most),
            most,
            int(source.choice(column)),
        ]
    )
    value = min(value, most)
    changes = {name.replace(".", "__"): at(row, value)}
    return f"{name}[{row}] {old} -> {value}", rebuilt(data, **changes)


def test_no_changed_number_gives_other_bytes(trained: tuple[Repo, dict[str, bytes]]) -> None:
    repo, expected = trained
    data = (Path(repo.url) / LAST.directory / "rank-00000.index").read_bytes()
    assert restored(repo, data) == expected
    source = random.Random(7)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    same = refused = 0
    for _ in range(150):
        what, bad = changed(data, source)
        try:
            assert restored(repo, bad) == expected, what
            same += 1
        except TenutoError:
            refused += 1
    assert refused > 80
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 200 << 10  # KiB


# -- other bytes where a pack should be --------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Two repositories of equally long data files with other bytes: a frozen part, and one that is stored as it is."""
    for name, seed in (("a", 1), ("b", 2)):
        source = np.random.default_rng(seed)
        state = {"frozen": source.random(5000), "w": source.random(3000)}
        with tenuto.Checkpointer(
            tmp_path / name, state, save=tenuto.every(steps=1), keep=tenuto.keep.all(), encoding="dedupe"
        ) as ckpt:
            for _ in ckpt.steps(3):
                state["w"][:] = source.random(3000)
    yield tmp_path / "a", tmp_path / "b"


def packs_of(where: Path) -> list[Path]:
    return sorted(where.rglob("*.pack"))


def test_a_data_file_of_another_save_under_the_right_name_is_refused(two: tuple[Path, Path]) -> None:
    """Of the same length and form: its header has the save's id, and the index the header's digest."""
    first, _ = two
    second_step, third_step = packs_of(first)[1:3]
    assert second_step.stat().st_size == third_step.stat().st_size
    third_step.write_bytes(second_step.read_bytes())
    with pytest.raises(CorruptionError, match=r"step-00000003/rank-00000\.pack"):
        tenuto.load(first, step=3)
    assert tenuto.load(first, step=2).step == 2


def test_a_data_file_of_another_repository_under_the_right_name_is_refused(two: tuple[Path, Path]) -> None:
    first, second = two
    ours, theirs = packs_of(first)[0], packs_of(second)[0]
    assert ours.stat().st_size == theirs.stat().st_size
    ours.write_bytes(theirs.read_bytes())
    for step in (1, 2, 3):
        with pytest.raises(CorruptionError, match=r"step-00000001/rank-00000\.pack"):
            tenuto.load(first, step=step)


def test_the_bytes_of_another_save_behind_the_right_header_are_refused(two: tuple[Path, Path]) -> None:
    first, second = two
    ours, theirs = packs_of(first)[0], packs_of(second)[0]
    header = 8 + int.from_bytes(ours.read_bytes()[:8], "little")
    ours.write_bytes(ours.read_bytes()[:header] + theirs.read_bytes()[header:])
    with pytest.raises(CorruptionError, match=r"^frozen is damaged: .*step-00000001/rank-00000\.pack"):
        tenuto.load(first, step=3)


@pytest.mark.parametrize("links", [1, 2])
def test_a_base_that_was_replaced_with_its_digest_is_refused(
    trained: tuple[Repo, dict[str, bytes]], links: int
) -> None:
    """Another base that is whole by itself: what is decoded from it is not what was saved."""
    repo, _ = trained
    index = repo.index(repo.manifest(LAST))
    stored = index.stored
    assert stored is not None
    chunk = int(np.flatnonzero(stored.base[: len(index.digests)] >= 0)[0])
    other = next(
        number
        for number in np.flatnonzero(stored.raw == stored.raw[chunk]).tolist()
        if number not in (chunk, int(stored.base[chunk])) and stored.base[number] < 0
    )
    base = stored.base.copy()
    for _ in range(links - 1):
        if base[base[chunk]] >= 0:
            chunk = int(base[chunk])
    base[chunk] = other
    bad = encode_index(replace(index, stored=replace(stored, base=base)), LAST, repo.id)
    with pytest.raises(CorruptionError, match=r"^w is damaged: .*\.pack"):
        restored(repo, bad)


def test_a_codec_that_nobody_knows_says_what_reads_it(trained: tuple[Repo, dict[str, bytes]]) -> None:
    repo, _ = trained
    index = repo.index(repo.manifest(LAST))
    assert index.stored is not None
    names = tuple("sevenzip" if name != RAW else name for name in index.stored.codecs[:2])
    bad = encode_index(
        replace(index, stored=replace(index.stored, codecs=(*names, *index.stored.codecs[2:]))), LAST, repo.id
    )
    with pytest.raises(FormatTooNew, match="sevenzip"):
        restored(repo, bad)


def test_a_bomb_takes_no_more_than_its_chunk_says() -> None:
    """A frame of few bytes that would be a gigabyte."""
    small = codec("zstd")
    data = small.encode(memoryview(bytes(MAX_CHUNK_BYTES)))
    assert data is not None and len(data) < 4096
    out = bytearray(1000)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptionError):
        small.decode(memoryview(data), memoryview(out))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 8 << 10  # KiB
