"""The readers of bytes, each as a function of bytes, and what must hold of it.

Most bytes that a checkpoint consists of are sealed by a digest, behind which a random change never gets. So a target
takes what lies inside the seal, and seals it itself; a target of a columnar file sets the header's length.

What must hold: the reader returns, or raises one of Tenuto's errors; names that it returns lead nowhere else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xxhash

from tenuto.codec.registry import codec, names
from tenuto.errors import TenutoError
from tenuto.model import canonical_json as canonical
from tenuto.model.ids import CheckpointId
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import Index, Manifest, StoredChunks
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.index import decode_index, decode_packs
from tenuto.repo.format.manifest import Aborted, decode_manifest, decode_outline
from tenuto.repo.format.safetensors import pad_header, parse_header
from tenuto.repo.format.shard_table import decode_boxes, saved_boxes
from tenuto.repo.format.small_records import decode_attempt, decode_begin, decode_lease, read_owner
from tenuto.repo.format.stored_chunks import MAX_CHAIN, MAX_CHUNK_BYTES, RAW
from tenuto.repo.identity import decode as decode_identity
from tenuto.sharding.coverage import check_coverage
from tenuto.state.restore.match import match_state
from tenuto.state.tree import leaf_paths

ID: Final = CheckpointId("main", 1, 20)
REPOSITORY: Final = "7" * 32
"""The id of the repository that everything is read in."""
MAX_BYTES: Final = 1 << 16
"""Longer inputs find nothing that shorter ones do not, and take longer."""


class Broken(AssertionError):
    """A reader did what it must not."""


def sealed(body: bytes) -> bytes:
    """`body`, an object's JSON without its digest and closing brace, with the digest that makes it whole."""
    return body + b',"digest":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}'


def _inside(name: str) -> None:
    """A name that a reader lets pass names an object of the checkpoint's own directory."""
    if "/" in name or "\\" in name or "\0" in name or name in ("", ".", "..") or not object_names.is_file(name):
        raise Broken(f"the name {name!r} leads out of the checkpoint's directory")


def header(data: bytes) -> None:
    found = parse_header(data, name="fuzzed")
    total = sum(entry.stop - entry.start for entry in found.values())
    if found.length + total != len(data):
        raise Broken("a header was read that does not cover its file")


def header_text(data: bytes) -> None:
    """The header's JSON and, after a zero byte, the tensors' bytes."""
    text, _, rest = data.partition(b"\0")
    try:
        block = pad_header(text.decode("ascii"), align=8)
    except UnicodeDecodeError:
        block = len(text).to_bytes(8, "little") + text
    header(block + rest)


def canonical_json(data: bytes) -> None:
    value = canonical.loads(data)
    text = canonical.dumps(value)
    if canonical.dumps(canonical.loads(text)) != text:
        raise Broken("a value does not come back from its canonical spelling")


def manifest(data: bytes) -> None:
    data = sealed(data)
    found = decode_manifest(data, ID, REPOSITORY)
    if isinstance(found, Aborted):
        return
    for entry in found.tables:
        _inside(entry.name)
    outline = decode_outline(data, ID, REPOSITORY)
    if outline is not None and (outline[0].indexes, outline[0].parent) != (found.indexes, found.parent):
        raise Broken("a manifest's outline is not that of the manifest")
    tree(canonical.dumps(found.tree))


def outline(data: bytes) -> None:
    """Only the outline is read: it must not let pass what the manifest's reader refuses but for the tree."""
    found = decode_outline(sealed(data), ID, REPOSITORY)
    if found is not None and isinstance(found[0], Manifest):
        for entry in found[0].tables:
            _inside(entry.name)


def tree(data: bytes) -> None:
    """A state's tree, its leaves' paths, and a state rebuilt from it with made-up leaves."""
    value = canonical.loads(data)
    paths = leaf_paths(value)
    specs = [LeafSpec(path, "uint8", (8,)) for path in paths]
    prepared = match_state(value, None, specs, None)
    for number, sink in prepared.wants:
        if sink.buffer is None:
            sink.fill(np.zeros(specs[number].nbytes, np.uint8))
    prepared.apply()


def index(data: bytes) -> None:
    """An index whose header's length is right: the header's JSON and, after a zero byte, the columns."""
    text, _, rest = data.partition(b"\0")
    try:
        block = pad_header(text.decode("ascii"), align=64) + rest
    except UnicodeDecodeError:
        block = data
    index_bytes(block)


def index_bytes(data: bytes) -> None:
    _, packs = decode_packs(data, id=ID, rank=0, repository=REPOSITORY)
    for pack in packs:
        _inside(pack.name)
    found = decode_index(data, id=ID, rank=0, tree=TREE, repository=REPOSITORY)
    if found.stored is not None:
        _encoded_chunks(found, found.stored)
        return
    lengths = {number: pack.length for number, pack in enumerate(found.packs)}
    for row, spec in enumerate(found.specs):
        if int(found.offset[row]) + int(found.length[row]) > lengths[int(found.pack[row])]:
            raise Broken(f"{spec.path} ends behind its pack")


def _encoded_chunks(found: Index, stored: StoredChunks) -> None:
    """What a reader does with the chunks of an encoded index stays within its packs and its memory, and ends."""
    for number in range(len(stored)):
        pack = found.packs[int(stored.pack[number])]
        if not pack.header_length <= stored.offset[number] <= pack.length - stored.stored[number]:
            raise Broken(f"chunk {number} does not lie in its pack")
        if pack.at == ID:
            raise Broken("the index calls its own pack another checkpoint's")
        name = stored.codecs[int(stored.codec[number])]
        if name != RAW and not 0 < stored.raw[number] <= MAX_CHUNK_BYTES:
            raise Broken(f"chunk {number} is decoded to {stored.raw[number]} bytes")
        reached, links = np.array([number]), 0
        while len(reached):
            below = np.unique(stored.below(reached))
            halves = stored.rounded is not None and bool(stored.rounded[reached].any())
            if links > MAX_CHAIN or (not halves and (stored.raw[below] != stored.raw[number]).any()):
                raise Broken(f"chunk {number} cannot be decoded from {below}")
            reached, links = below, links + 1
        if stored.rounded is not None and stored.rounded[number]:
            held = sum(int(stored.raw[one]) for one in stored.below(np.array([number])))
            if held < 2 * stored.raw[number] or any(
                one >= len(found.digests) for one in stored.below(np.array([number]))
            ):
                raise Broken(f"chunk {number} is rounded from fewer numbers than it has")
    if int(stored.raw[: len(found.digests)].sum()) != int(found.length.sum()):
        raise Broken("the chunks are not as long as the leaves")


def stored_chunk(data: bytes) -> None:
    """A chunk as it is stored: the number of its codec, its length when decoded (3 bytes), then its stored bytes."""
    if len(data) < 4:
        return
    one = codec(CODECS[data[0] % len(CODECS)])
    size = 1 + int.from_bytes(data[1:4], "little") % MAX_DECODED
    base = memoryview(bytes(range(256)) * (size // 256 + 1))[:size] if one.needs_base else None
    out = bytearray(size)
    one.decode(memoryview(data)[4:], memoryview(out), base)
    if len(out) != size:
        raise Broken("decoding changes the length of what it fills")


CODECS: Final = names()
MAX_DECODED: Final = 1 << 18
"""Chunks that a fuzzer decodes are shorter than this."""


def boxes(data: bytes) -> None:
    """The table of parts, like `index`: the header's JSON and, after a zero byte, the columns."""
    text, _, rest = data.partition(b"\0")
    try:
        block = pad_header(text.decode("ascii"), align=64) + rest
    except UnicodeDecodeError:
        block = data
    found = decode_boxes(block, id=ID, save_id=BOXES_OF, ranks=2, leaves=2, repository=REPOSITORY)
    for at, leaf in enumerate(found.leaf.tolist()):
        cut, whole = slice(*found.bounds[at : at + 2].tolist()), slice(*found.ends[leaf : leaf + 2].tolist())
        if (found.origin[cut] < 0).any() or (found.origin[cut] + found.shape[cut] > found.whole[whole]).any():
            raise Broken(f"part {at} does not lie in its leaf")
    with contextlib.suppress(TenutoError):
        check_coverage(saved_boxes(found, ("a", "b")))


BOXES_OF: Final = "5" * 32
"""The save whose table of parts is read."""
TREE: Final[Any] = {
    "!": "dict",
    "i": [["a", {"!": "leaf", "as": "numpy", "n": 0}], ["b", {"!": "leaf", "as": "numpy", "n": 1}]],
}


def begin(data: bytes) -> None:
    for name in decode_begin(sealed(data), ID, REPOSITORY).names:
        _inside(name)


def attempt(data: bytes) -> None:
    decode_attempt(sealed(data), "main", 1, REPOSITORY)


def lease(data: bytes) -> None:
    decode_lease(sealed(data), "main", 1, 2, REPOSITORY)


def note(data: bytes) -> None:
    name = f"{object_names.notes_directory(ID)}/1.json"
    found = objects.decode("note", name, sealed(data), REPOSITORY)
    found.text("note")
    found.mapping("body")


def ref(data: bytes) -> None:
    objects.decode("ref", "refs/tag/best/1.json", sealed(data), REPOSITORY).checkpoint("to")


def tombstone(data: bytes) -> None:
    name = "tombstones/main/a0001/step-00000020/1.json"
    found = objects.decode("tombstone", name, sealed(data), REPOSITORY)
    read_owner(found)
    found.text("reason")
    found.whole("attempt")


def repository(data: bytes) -> None:
    decode_identity(object_names.REPOSITORY, sealed(data))


@dataclass(frozen=True)
class Target:
    """`words`: what a fuzzer splices in, beside what it finds by itself."""

    name: str
    run: Callable[[bytes], None]
    words: tuple[str, ...] = ()

    def __call__(self, data: bytes) -> None:
        """Raises what must not be raised."""
        try:
            self.run(data[:MAX_BYTES])
        except TenutoError as error:
            if not error.message:
                raise Broken("an error says nothing") from error


_KINDS: Final = """! i n v as type tuple list set frozenset dict ordereddict defaultdict counter deque object module
optimizer tagged enum dataclass namedtuple generator nprandom random npscalar int float str bytes bytearray complex
range slice datetime date time timedelta decimal fraction uuid path private bypath sparse subclass leaf alias dtype
numpy torch"""
_NODES: Final = (
    '{"!":"leaf","as":"numpy","n":0}',
    '{"!":"alias","as":"numpy","n":0}',
    '{"!":"dict","i":[]}',
    *(f'"{word}"' for word in _KINDS.split()),
)
_HEADER: Final = ('"dtype":"F32"', '"shape":[', '"data_offsets":[0,8]', '"__metadata__":{', "9223372036854775807", "-1")
_PLANES: Final = ("\x00\x00\x00\x00", "\x01\x10\x00\x00\x00", "\x02\x01\x00\x00\x00")
"""Entries of a table of planes."""
_PATHS: Final = ("..", "/", "\\\\", "\\u0000", "\\ud800", "null", "1e308", "NaN", "9007199254740993", "-0")

TARGETS: Final[dict[str, Target]] = {
    target.name: target
    for target in (
        Target("header", header, _HEADER),
        Target("header_text", header_text, _HEADER),
        Target("canonical", canonical_json, _PATHS),
        Target("manifest", manifest, _NODES + _PATHS),
        Target("outline", outline, _PATHS),
        Target("tree", tree, _NODES + _PATHS),
        Target("index", index, _HEADER),
        Target("index_bytes", index_bytes, _HEADER),
        Target("boxes", boxes, _HEADER),
        Target("stored_chunk", stored_chunk, _PLANES),
        Target("begin", begin, _PATHS),
        Target("attempt", attempt, _PATHS),
        Target("lease", lease, _PATHS),
        Target("note", note, _PATHS),
        Target("ref", ref, _PATHS),
        Target("tombstone", tombstone, _PATHS),
        Target("repository", repository, _PATHS),
    )
}
