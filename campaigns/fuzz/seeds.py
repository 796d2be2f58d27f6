"""Valid inputs to begin with: each target's object as it is written, without the seal that the target puts on."""

from __future__ import annotations

import datetime as dt
import decimal
import fractions
import importlib.util
import pathlib
import random
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np

from campaigns.fuzz.targets import BOXES_OF, CODECS, ID, REPOSITORY, TREE
from tenuto.codec.digest import digest
from tenuto.codec.registry import codec
from tenuto.concurrency.process import this_process
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import AttemptRecord, Index, IndexEntry, Manifest, PackEntry, StoredChunks
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.index import encode_index
from tenuto.repo.format.manifest import Aborted, encode_aborted, encode_manifest
from tenuto.repo.format.shard_table import BoxTable, encode_boxes
from tenuto.repo.format.small_records import Begin, LeaseRecord, encode_attempt, encode_begin, encode_lease, owner_json
from tenuto.repo.format.stored_chunks import RAW
from tenuto.state.encode.flattener import flatten

_SAVE: Final = "5" * 32
_SEAL: Final = len(b',"digest":"') + 32 + len(b'"}')


def state() -> dict[str, Any]:
    """One of every kind of value that a tree can hold."""
    shared = np.arange(6, dtype=np.float32)
    return {
        "arrays": {"a": shared, "too": shared, "b": np.zeros((0, 3)), "c": np.float64(2.5)},
        "plain": [None, True, 2**80, 0.1, float("nan"), -0.0, "t\u00fc\ud800", b"\0\xff", bytearray(3), 1 + 2j, ...],
        "containers": [(1, (2,)), {1, 2}, frozenset({3}), deque([1], 3), OrderedDict(a=1), Counter(a=2)],
        "more": [range(3), slice(1, None), decimal.Decimal("1.5"), fractions.Fraction(1, 3), uuid.UUID(int=5)],
        "times": [dt.date(2026, 1, 2), dt.datetime(2026, 1, 2, tzinfo=dt.UTC), dt.time(3), dt.timedelta(1)],
        "odd": {7: 1, (1, "k"): 2, None: 3, 1.5: 4, "~/@#": 5, "": 6, "default": defaultdict(int, a=1)},
        "random": [random.Random(3), np.random.default_rng(3), pathlib.PurePosixPath("/x")],
        "long": bytes(5000),
    }


def make() -> dict[str, list[bytes]]:
    found = flatten(state())
    small = flatten({"a": np.zeros(2, np.float32), "b": np.ones((2, 1), np.uint8)})
    manifests = [
        _manifest(found.tree),
        _manifest(small.tree),
        encode_aborted(Aborted(ID, _SAVE, "somebody"), REPOSITORY),
    ]
    index = encode_index(_index(), ID, REPOSITORY)
    split = _split(index)
    encoded, rounded = (encode_index(one, ID, REPOSITORY) for one in (_encoded_index(), _rounded_index()))
    parent = CheckpointId("other", 1, 3)
    who = this_process()
    record = AttemptRecord("main", 1, _SAVE, parent, who, "2026-01-02T03:04:05Z")
    place = {"run": "main", "attempt": 1, "step": 20}
    return {
        "header": [_file(), index, encoded],
        "header_text": [_file()[8:-10].rstrip() + b"\0" + bytes(10), split],
        "canonical": [canonical_json.dumps(found.tree), b'[1,1.0,-0.0,1e+300,"\\u00fc",null,true,{"a":{}}]'],
        "manifest": [_open(one) for one in manifests],
        "outline": [_open(one) for one in manifests],
        "tree": [canonical_json.dumps(found.tree), canonical_json.dumps(small.tree), *_single_values()],
        "index": [split, _split(encoded), _split(rounded)],
        "index_bytes": [index, encoded, rounded],
        "stored_chunk": list(_stored_chunks()),
        "boxes": [_split(encode_boxes(_boxes(), ID, BOXES_OF, REPOSITORY))],
        "begin": [
            _open(encode_begin(Begin(ID, _SAVE, ("rank-00000.index", "rank-00000.safetensors"), None), REPOSITORY))
        ],
        "attempt": [_open(encode_attempt(record, REPOSITORY))],
        "lease": [_open(encode_lease(LeaseRecord(2, _SAVE, parent, True, False), "main", 1, REPOSITORY))],
        "note": [
            _object("note", f"{object_names.notes_directory(ID)}/1.json", {"note": "metric", "body": {"loss": 0.5}})
        ],
        "ref": [_object("ref", "refs/tag/best/1.json", {"created": "", "to": place})],
        "tombstone": [
            _object(
                "tombstone",
                "tombstones/main/a0001/step-00000020/1.json",
                {"attempt": 0, "created": "", "owner": owner_json(who), "reason": "rm"},
            )
        ],
        "repository": [
            _object(
                "repository",
                object_names.REPOSITORY,
                {
                    "chunk_bytes": 262144,
                    "created": "",
                    "digests": {"chunk": "xxh3-128", "content": "sha-256", "object": "xxh3-128"},
                    "id": _SAVE,
                    "version": "0.1",
                },
            )
        ],
    }


def _single_values() -> list[bytes]:
    """Each plain value as a tree of its own: small inputs are explored fastest."""
    values = [one for part in ("plain", "containers", "more", "times", "random") for one in state()[part]]
    trees = [canonical_json.dumps(flatten({"v": value}).tree) for value in values]
    if importlib.util.find_spec("torch") is not None:
        trees.append(b'{"!":"dict","i":[["w",{"!":"leaf","as":"torch","n":0}]]}')
    return trees


def _manifest(tree: Any) -> bytes:
    entry = IndexEntry("rank-00000.index", 2923, bytes(16))
    return encode_manifest(
        Manifest(
            id=ID,
            save_id=_SAVE,
            tree=tree,
            indexes=(entry,),
            content="0" * 64,
            bytes=6750,
            leaves=2,
            chunk_bytes=1024,
            parent=CheckpointId("other", 2, 7),
            metrics={"loss": 1.0, "odd": float("nan")},
            progress={"step": 20},
            environment={"python": "3.11"},
            certificate={"exact": True},
            created="2026-01-02T03:04:05Z",
        ),
        REPOSITORY,
    )


def _index() -> Index:
    specs = [LeafSpec("a", "float32", (2,)), LeafSpec("b", "uint8", (2, 1))]
    assert TREE["i"][0][0] == "a"
    digests = np.frombuffer(digest(bytes(8)) + digest(bytes(2)), np.uint8).reshape(2, 16)
    return Index(
        rank=0,
        save_id=_SAVE,
        chunk_bytes=1024,
        packs=(PackEntry("rank-00000.safetensors", 4106, 4096, bytes(16)),),
        specs=specs,
        pack=np.zeros(2, np.int64),
        offset=np.array([4096, 4104]),
        length=np.array([8, 2]),
        chunk_start=np.array([0, 1, 2]),
        digests=digests,
        private=None,
    )


def _encoded_index() -> Index:
    """`a` is a difference to a chunk of another checkpoint, `b` lies there as it is."""
    columns = ([0, 1, 1], [128, 4096, 4100], [5, 2, 8], [8, 2, 8], [1, 0, 0], [2, -1, -1])
    pack, offset, stored, raw, codec, base = (np.array(column, np.int64) for column in columns)
    plain = _index()
    digests = np.stack([np.full(16, 3, np.uint8), plain.digests[1], np.full(16, 4, np.uint8)])
    packs = (
        PackEntry("rank-00000.pack", 133, 128, bytes(16)),
        PackEntry("rank-00000.pack", 5000, 4096, bytes(16), at=CheckpointId("other", 1, 3)),
    )
    return replace(
        plain,
        packs=packs,
        offset=np.zeros(2, np.int64),
        stored=StoredChunks(("raw", "delta4-zstd"), pack, offset, stored, raw, codec, base, digests),
    )


def _rounded_index() -> Index:
    """`b` is the rounding of `a`, which lies as it is."""
    plain = _encoded_index()
    specs = [LeafSpec("a", "float32", (2,)), LeafSpec("b", "bfloat16", (2,))]
    columns = ([0, 0], [128, 136], [8, 3], [8, 4], [0, 1], [-1, 0])
    pack, offset, stored, raw, codec, base = (np.array(column, np.int64) for column in columns)
    digests = np.stack([np.full(16, 3, np.uint8), np.full(16, 4, np.uint8)])
    return replace(
        plain,
        packs=(PackEntry("rank-00000.pack", 139, 128, bytes(16)),),
        specs=specs,
        length=np.array([8, 4]),
        digests=digests,
        stored=StoredChunks(
            ("raw", "xor2-zstd"), pack, offset, stored, raw, codec, base, digests, np.array([0, 1], np.uint8)
        ),
    )


def _stored_chunks() -> Iterator[bytes]:
    """Of every codec what it makes of a chunk that shrinks, and of one of an odd length."""
    for number, name in enumerate(CODECS):
        for raw in (bytes(300), bytes(range(7)) * 45 + b"x"):
            base = memoryview((bytes(range(256)) * 2)[: len(raw)])
            stored = codec(name).encode(memoryview(raw), base if codec(name).needs_base else None)
            stored = raw if name == RAW else stored
            if stored is not None:
                yield bytes([number]) + (len(raw) - 1).to_bytes(3, "little") + stored


def _split(data: bytes) -> bytes:
    """A file of columns as its header's JSON and, after a zero byte, the rest."""
    length = int.from_bytes(data[:8], "little")
    return data[8 : 8 + length].rstrip() + b"\0" + data[8 + length :]


def _boxes() -> BoxTable:
    """The leaves of TREE over two ranks: `a` cut in two, `b` on one."""
    columns = ([0, 0, 1], [0, 1, 1], [0, 0, 1], [0, 1, 0, 0], [1, 1, 2, 1], [0, 1, 2, 4])
    leaf, rank, row, origin, shape, bounds = (np.array(column, np.int64) for column in columns)
    code, whole, ends = np.array([0, 1]), np.array([2, 2, 1]), np.array([0, 1, 3])
    return BoxTable(leaf, rank, row, origin, shape, bounds, ["float32", "uint8"], code, whole, ends)


def _file() -> bytes:
    text = b'{"__metadata__":{"save":"x"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},' + (
        b'"b":{"dtype":"U8","shape":[2,1],"data_offsets":[8,10]}}'
    )
    text += b" " * (-len(text) % 8 + 8)
    return len(text).to_bytes(8, "little") + text + bytes(10)


def _object(kind: str, name: str, body: dict[str, Any]) -> bytes:
    return _open(objects.encode(kind, name, body, None if kind == "repository" else REPOSITORY))


def _open(data: bytes) -> bytes:
    """Without the seal."""
    return data[:-_SEAL]
