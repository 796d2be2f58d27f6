"""Makes the files of this corpus: `python tests/attacks/make_attacks.py`. One lie each, told in `attacks.jsonl`.

Each is an object of the checkpoint main/a0002/15 of the golden repository, changed in one place, and sealed again: a
digest keeps accidents out, not a hostile writer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

# ruff: noqa: E501 - a line a lie


HERE = Path(__file__).parent
GOLDEN = HERE.parent / "golden" / "1" / "repository"
STEP = "runs/main/a0002/step-00000015"
MANIFEST = f"{STEP}/manifest.json"
OURS = json.loads((GOLDEN / "tenuto.json").read_bytes())["id"]
INDEX = f"{STEP}/rank-00000.index"
PACK = f"{STEP}/rank-00000.safetensors"


def sealed(body: bytes) -> bytes:
    """`body`: an object without its closing brace."""
    return body + b',"digest":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}'


def dumped(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def changed(name: str, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The golden object, its fields changed."""
    value = json.loads((GOLDEN / name).read_bytes())
    del value["digest"]
    change(value)
    return sealed(dumped(value)[:-1])


def spelled(name: str, old: str, new: str) -> bytes:
    """The golden object, its text changed."""
    data = (GOLDEN / name).read_bytes()
    body = data[: data.rindex(b',"digest":')]
    assert body.count(old.encode()) >= 1, old
    return sealed(body.replace(old.encode(), new.encode(), 1))


def split(name: str) -> tuple[dict[str, Any], bytes]:
    """Header and tensors of a safetensors file."""
    data = (GOLDEN / name).read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def joined(header: bytes, rest: bytes, align: int = 64) -> bytes:
    header += b" " * (-(8 + len(header)) % align)
    return len(header).to_bytes(8, "little") + header + rest


def header(change: Callable[[dict[str, Any]], None]) -> bytes:
    """The golden pack, its header's fields changed."""
    fields, rest = split(PACK)
    change(fields)
    return joined(json.dumps(fields, separators=(",", ":")).encode(), rest, 4096)


def header_text(text: str) -> bytes:
    return joined(text.encode("utf-8", "surrogatepass"), split(PACK)[1], 4096)


def column(name: str, change: Callable[[Any], None]) -> bytes:
    """The golden index, one number in one column changed."""
    import numpy as np

    fields, rest = split(INDEX)
    kinds = {"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1"}
    start, stop = fields[name]["data_offsets"]
    values = np.frombuffer(rest[start:stop], kinds[fields[name]["dtype"]]).copy()
    change(values)
    return joined(json.dumps(fields, separators=(",", ":")).encode(), rest[:start] + values.tobytes() + rest[stop:])


def head(change: Callable[[dict[str, Any]], None]) -> bytes:
    """The golden index, its JSON head changed; the columns behind it move."""
    fields, rest = split(INDEX)
    start, stop = fields["head"]["data_offsets"]
    value = json.loads(rest[start:stop])
    change(value)
    text = dumped(value)
    more = len(text) - (stop - start)
    for name, field in fields.items():
        if name != "__metadata__" and field["data_offsets"][0] >= stop:
            field["data_offsets"] = [at + more for at in field["data_offsets"]]
    fields["head"].update(shape=[len(text)], data_offsets=[start, start + len(text)])
    return joined(json.dumps(fields, separators=(",", ":")).encode(), rest[:start] + text + rest[stop:])


def put(*path: Any) -> Callable[[Any], None]:
    """Sets what lies at a path: the last of the words is the value."""

    def change(value: Any) -> None:
        *way, last, new = path
        for step in way:
            value = value[step]
        value[last] = new

    return change


def tree(node: Any) -> bytes:
    """The golden manifest with one entry of its tree replaced."""
    return changed(MANIFEST, lambda value: value["tree"]["i"][0][1]["i"].append(["attack", node]))


def nested(depth: int, inside: Any = None) -> Any:
    for _ in range(depth):
        inside = [inside]
    return inside


def first(fields: dict[str, Any]) -> dict[str, Any]:
    return next(field for name, field in fields.items() if name != "__metadata__")


def attacks() -> list[tuple[str, str, str, bytes]]:
    """Object, file, lie, bytes."""
    return [*_headers(), *_indexes(), *_manifests(), *_trees(), *_small()]


def _headers() -> list[tuple[str, str, str, bytes]]:
    fields, rest = split(PACK)
    name = next(key for key in fields if key != "__metadata__")
    text = json.dumps(fields, separators=(",", ":"))
    entry = json.dumps(first(fields), separators=(",", ":"))
    whole = (GOLDEN / PACK).read_bytes()
    many = "{" + ",".join(f'"t{n}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for n in range(3000)) + "}"
    made = [
        ("length-overflow", "the header is 2^64-1 bytes long", b"\xff" * 8 + whole[8:]),
        ("length-beyond-file", "the header is longer than the file", (2**26).to_bytes(8, "little") + whole[8:]),
        ("length-nought", "the header has no bytes", bytes(8) + whole[8:]),
        ("file-of-seven-bytes", "the file is a header", b"\x10\0\0\0\0\0\0"),
        ("overlap", "two tensors share bytes", header(lambda f: first(f).update(data_offsets=[8, 16]))),
        ("beyond-end", "a tensor ends behind the file", header(lambda f: first(f).update(data_offsets=[0, 2**62]))),
        ("backwards", "a tensor ends before it begins", header(lambda f: first(f).update(data_offsets=[16, 8]))),
        ("negative-offset", "a tensor begins before the file", header(lambda f: first(f).update(data_offsets=[-8, 8]))),
        ("hole", "bytes belong to no tensor", header_text(text) + bytes(64)),
        ("twice", "a tensor is named twice", header_text("{" + f'"{name}":{entry},' + text[1:])),
        ("metadata-twice", "the metadata come twice", header_text('{"__metadata__":{},' + text[1:])),
        ("negative-shape", "a tensor has -1 rows", header(lambda f: first(f).update(shape=[-1]))),
        (
            "shape-overflow",
            "a shape's product is 2^128",
            header(lambda f: first(f).update(shape=[2**63 - 1, 2**63 - 1])),
        ),
        ("shape-of-floats", "a shape is no whole number", header(lambda f: first(f).update(shape=[1.0]))),
        ("shape-nan", "a shape is NaN", header(lambda f: first(f).update(shape=[float("nan")]))),
        ("dtype-unknown", "a dtype that there is not", header(lambda f: first(f).update(dtype="F31"))),
        ("dtype-object", "a dtype of Python objects", header(lambda f: first(f).update(dtype="O"))),
        ("dtype-other", "a dtype of another size", header(lambda f: first(f).update(dtype="F8_E4M3"))),
        ("entry-is-a-list", "an entry is no object", header_text('{"a":[1,2]}')),
        ("many-entries", "3,000 tensors of no bytes", joined(many.encode(), rest, 4096)),
        ("deep", "brackets 5,000 deep", header_text('{"a":' + "[" * 5000 + "]" * 5000 + "}")),
        (
            "not-utf-8",
            "a name is no text",
            joined(text.encode().replace(b'"__meta', b'"\xff\xfe__meta', 1), rest, 4096),
        ),
        ("lone-surrogate", "a name is half a character", header_text(text.replace(f'"{name}"', '"\\ud800"', 1))),
        ("cut", "the header ends in the middle", header_text(text[: len(text) // 2])),
        ("goes-on", "something follows the header", header_text(text + "{}")),
    ]
    return [(PACK, f"header/{file}", lie, data) for file, lie, data in made]


def _indexes() -> list[tuple[str, str, str, bytes]]:
    fields, rest = split(INDEX)
    other = dict(fields)
    other["more"] = {"dtype": "U8", "shape": [0], "data_offsets": [len(rest), len(rest)]}
    entry = {"digest": "0" * 32, "header": 8, "length": 8, "name": "rank-00000.safetensors"}
    made = [
        ("offset-2-64", "a leaf begins at 2^64-1", column("offset", put(0, 2**64 - 1))),
        ("offset-beyond", "a leaf begins behind its pack", column("offset", put(0, 2**40))),
        ("offset-in-header", "a leaf lies in its pack's header", column("offset", put(0, 8))),
        ("overlap", "two leaves share bytes", column("offset", lambda v: v.__setitem__(1, v[0]))),
        ("length-2-63", "a leaf has 2^63 bytes", column("length", put(0, 2**63))),
        ("length-longer", "a leaf is longer than its shape", column("length", lambda v: v.__setitem__(0, v[0] + 1))),
        ("ends-fall", "a column of ends falls", column("shape.ends", lambda v: v.__setitem__(0, 2**40))),
        ("ends-backwards", "the last end is before the first", column("shape.ends", lambda v: v.__setitem__(-1, 0))),
        ("digests-short", "there are fewer digests", column("digests.ends", lambda v: v.__setitem__(-1, v[-1] - 1))),
        ("digests-2-60", "there are 2^60 digests", column("digests.ends", lambda v: v.__setitem__(-1, 2**60))),
        ("shape-2-63", "a dimension of 2^63", column("shape", put(0, 2**63))),
        ("pack-beyond", "a leaf lies in the 2^31st pack", column("pack", put(0, 2**31))),
        ("dtype-beyond", "a dtype that is not listed", column("dtype", put(0, 65535))),
        ("leaf-order", "leaves in another order", column("leaf", put(0, 5))),
        (
            "dtype-object",
            "an array of Python objects",
            head(lambda h: h.update(dtypes=["numpy:|O8"] * len(h["dtypes"]))),
        ),
        (
            "dtype-huge",
            "items of 2^30 bytes",
            head(lambda h: h.update(dtypes=["numpy:|V999999999"] * len(h["dtypes"]))),
        ),
        ("pack-path", "a pack elsewhere", head(lambda h: h["packs"][0].update(name="../../../../../etc/passwd"))),
        ("pack-absolute", "a pack at the root", head(lambda h: h["packs"][0].update(name="/etc/passwd"))),
        ("pack-nul", "a pack's name with a zero", head(lambda h: h["packs"][0].update(name="rank\0.safetensors"))),
        ("pack-is-manifest", "a pack is the manifest", head(lambda h: h["packs"][0].update(name="manifest.json"))),
        ("pack-length-2-53", "a pack of 2^53 bytes", head(lambda h: h["packs"][0].update(length=2**53))),
        ("pack-twice", "a pack is named twice", head(lambda h: h["packs"].append(h["packs"][0]))),
        (
            "packs-5000",
            "5,000 packs",
            head(lambda h: h.update(packs=[{**entry, "name": f"p{n}"} for n in range(5000)])),
        ),
        ("chunk-nought", "chunks of no bytes", head(lambda h: h.update(chunk_bytes=0))),
        ("chunk-2-53", "chunks of 2^53 bytes", head(lambda h: h.update(chunk_bytes=2**53))),
        ("shared-minus", "minus one shared leaves", head(lambda h: h.update(shared=-1))),
        ("shared-fewer", "a shared leaf is private", head(lambda h: h.update(shared=h["shared"] - 1))),
        ("rank-other", "another rank's", head(lambda h: h.update(rank=1))),
        ("path-other", "another checkpoint's", head(lambda h: h.update(path=INDEX.replace("15", "20")))),
        ("format-newer", "a newer format", head(lambda h: h.update(format=2**40))),
        ("format-true", "a format that is no number", head(lambda h: h.update(format=True))),
        ("column-more", "a column too many", joined(json.dumps(other).encode(), rest)),
        ("empty", "no columns at all", joined(b"{}", b"")),
    ]
    return [(INDEX, f"index/{file}", lie, data) for file, lie, data in made]


def _manifests() -> list[tuple[str, str, str, bytes]]:
    index = {"digest": "0" * 32, "length": 2923, "name": "rank-00000.index"}
    made = [
        ("another-repository", "it is of another repository", changed(MANIFEST, put("repository", "0" * 32))),
        ("index-path", "an index elsewhere", changed(MANIFEST, put("indexes", 0, "name", "../../../../tenuto.json"))),
        ("index-absolute", "an index at the root", changed(MANIFEST, put("indexes", 0, "name", "/etc/passwd"))),
        ("index-newline", "an index's name with a line end", changed(MANIFEST, put("indexes", 0, "name", "rank\n.index"))),
        ("index-2-53", "an index of 2^53 bytes", changed(MANIFEST, put("indexes", 0, "length", 2**53))),
        ("index-negative", "an index of -1 bytes", changed(MANIFEST, put("indexes", 0, "length", -1))),
        ("index-none", "no index", changed(MANIFEST, put("indexes", []))),
        ("indexes-2000", "2,000 times an index", changed(MANIFEST, put("indexes", [index] * 2000))),
        ("step-other", "another step's", changed(MANIFEST, put("step", 16))),
        ("step-text", "a step that is a text", changed(MANIFEST, put("step", "15"))),
        ("step-float", "a step that is a float", changed(MANIFEST, put("step", 15.0))),
        ("run-other", "another run's", changed(MANIFEST, put("run", "../main"))),
        ("run-case", "the run in capitals", changed(MANIFEST, put("run", "MAIN"))),
        ("run-look-alike", "the run with a Cyrillic letter", changed(MANIFEST, put("run", "m\u0430in"))),
        ("path-other", "a copy from elsewhere", changed(MANIFEST, put("path", "runs/main/a0001/step-00000020/manifest.json"))),
        ("parent-itself", "it goes on from itself", changed(MANIFEST, put("parent", {"attempt": 3, "run": "main", "step": 1}))),
        ("parent-path", "a parent elsewhere", changed(MANIFEST, put("parent", {"attempt": 1, "run": "../x", "step": 1}))),
        ("chunk-nought", "chunks of no bytes", changed(MANIFEST, put("chunk_bytes", 0))),
        ("bytes-negative", "it has -1 bytes", changed(MANIFEST, put("bytes", -1))),
        ("metric-text", "a metric is a text", changed(MANIFEST, put("metrics", {"loss": "0.5"}))),
        ("metric-4300-digits", "a metric of 5,000 digits", changed(MANIFEST, put("metrics", {"x": {"!": "int", "v": "9" * 5000}}))),
        ("key-twice", "a field comes twice", spelled(MANIFEST, '"step":15', '"step":15,"step":15')),
        ("nan", "a field is NaN", spelled(MANIFEST, '"step":15', '"step":NaN')),
        ("infinity", "a field is 1e999", spelled(MANIFEST, '"step":15', '"step":1e999')),
        ("huge-integer", "a field of 4,000 digits", spelled(MANIFEST, '"step":15', '"step":' + "9" * 4000)),
        ("spaces", "spaces between the tokens", spelled(MANIFEST, '"step":15', '"step": 15')),
        ("not-ascii", "letters beyond ASCII", spelled(MANIFEST, '"kind":"manifest"', '"kind":"m\u00e4nifest"')),
        ("deep", "brackets 50,000 deep", spelled(MANIFEST, '"step":15', '"step":' + "[" * 50_000 + "]" * 50_000)),
        ("is-a-list", "a list", sealed(b'[{"path":"x"')),
        ("kind-other", "another kind of object", changed(MANIFEST, put("kind", "begin"))),
        ("format-newer", "a newer format", changed(MANIFEST, put("format", 99))),
    ]  # fmt: skip
    return [(MANIFEST, f"manifest/{file}", lie, data) for file, lie, data in made]


def _trees() -> list[tuple[str, str, str, bytes]]:
    made = [
        ("deep", "lists 300 deep", tree(nested(300))),
        ("dicts-deep", "dictionaries 150 deep", tree(json.loads('{"!":"dict","i":[["a",' * 130 + "1" + "]]}" * 130))),
        ("alias-beyond", "an alias of no leaf", tree({"!": "alias", "as": "numpy", "n": 999})),
        ("alias-negative", "an alias of leaf -1", tree({"!": "alias", "as": "numpy", "n": -1})),
        ("leaf-twice", "a leaf is named twice", tree({"!": "leaf", "as": "numpy", "n": 0})),
        ("leaf-gap", "a leaf number is left out", tree({"!": "leaf", "as": "numpy", "n": 999})),
        ("leaf-2-53", "leaf 2^53", tree({"!": "leaf", "as": "numpy", "n": 2**53})),
        ("leaf-true", "a leaf number is true", tree({"!": "leaf", "as": "numpy", "n": True})),
        ("leaf-as-os", "a leaf for os.system", tree({"!": "leaf", "as": "os.system", "n": 23})),
        ("kind-unknown", "a kind that there is not", tree({"!": "os.system", "v": "touch owned"})),
        ("kind-number", "a kind is a number", tree({"!": 7})),
        ("kind-missing", "an object without a kind", tree({"v": 7})),
        ("pairs-broken", "pairs of three", tree({"!": "dict", "i": [["a", 1, 2]]})),
        ("same-path", "two leaves at one path", tree({"!": "dict", "i": [["a", {"!": "leaf", "as": "numpy", "n": 23}]] * 2})),
        ("int-5000-digits", "a number of 5,000 digits", tree({"!": "int", "v": "9" * 5000})),
        ("bytes-no-base64", "bytes that are none", tree({"!": "bytes", "v": "\u00a7"})),
        ("scalar-object", "a numpy scalar of an object", tree({"!": "npscalar", "dtype": "|O", "v": "AAAAAAAAAAA="})),
        ("scalar-huge", "a numpy scalar of 2 GB", tree({"!": "npscalar", "dtype": "|V2000000000", "v": ""})),
        ("range-nought", "a range that never steps", tree({"!": "range", "v": [0, 1, 0]})),
        ("date-beyond", "the year 99999", tree({"!": "date", "v": [99999, 1, 1]})),
        ("decimal-none", "a decimal that is none", tree({"!": "decimal", "v": "__import__('os')"})),
        ("fraction-nought", "a fraction over nought", tree({"!": "fraction", "v": [1, 0]})),
        ("set-of-lists", "a set of what has no hash", tree({"!": "set", "i": [[1]]})),
        ("random-broken", "a random state of no words", tree({"!": "random", "v": []})),
        ("path-kind", "a path of another class", tree({"!": "path", "type": "Popen", "v": "x"})),
    ]  # fmt: skip
    return [(MANIFEST, f"tree/{file}", lie, data) for file, lie, data in made]


def _small() -> list[tuple[str, str, str, bytes]]:
    attempt = "runs/main/a0002/attempt.json"
    begin = f"{STEP}/begin.json"
    note = f"{STEP}/notes/1.json"
    ref = "refs/tag/evil/1.json"
    lease = "runs/main/a0002/lease/3.json"
    stone = "tombstones/main/a0002/step-00000015/1.json"

    def new(name: str, kind: str, **body: Any) -> bytes:
        return sealed(dumped({"format": 1, "kind": kind, "path": name, "repository": OURS, **body})[:-1])

    escape = "\x1b]0;owned\x07\x1b[2J\r\nfake line\u202e"
    return [
        (begin, "begin/names-path", "it will write elsewhere", changed(begin, put("names", ["../../../etc/passwd"]))),
        (begin, "begin/names-twice", "one name twice", changed(begin, put("names", ["a", "a"]))),
        (begin, "begin/names-numbers", "names are numbers", changed(begin, put("names", [1, 2]))),
        (attempt, "attempt/parent-higher", "it goes on from a later one",
         changed(attempt, put("parent", {"attempt": 9, "run": "main", "step": 1}))),
        (attempt, "attempt/pid-huge", "process 2^53", changed(attempt, put("owner", "pid", 2**53))),
        (attempt, "attempt/pid-negative", "process -1", changed(attempt, put("owner", "pid", -1))),
        (attempt, "attempt/host-escape", "a host that moves the cursor", changed(attempt, put("owner", "host", escape))),
        (lease, "lease/closed-text", "a flag is a text", changed(lease, put("closed", "yes"))),
        (note, "note/escape", "a metric's name that moves the cursor",
         new(note, "note", note="metric", created="", body={escape: 1.0})),
        (note, "note/body-list", "a note that is a list", new(note, "note", note="metric", created="", body=[1])),
        (note, "note/huge-number", "a metric of 5,000 digits",
         new(note, "note", note="metric", created="", body={"x": {"!": "int", "v": "9" * 5000}})),
        (ref, "ref/to-elsewhere", "it points out of the repository",
         new(ref, "ref", created="", to={"attempt": 1, "run": "../..", "step": 1})),
        (ref, "ref/to-nothing", "it points at what is not there",
         new(ref, "ref", created="", to={"attempt": 77, "run": "main", "step": 1})),
        (ref, "ref/to-text", "it points at a text", new(ref, "ref", created="", to="main/a0002/15")),
        (stone, "tombstone/owner-none", "nobody's", new(stone, "tombstone", reason=escape, attempt=0, created="")),
        ("tenuto.json", "repository/chunk-nought", "chunks of no bytes", changed("tenuto.json", put("chunk_bytes", 0))),
        ("tenuto.json", "repository/chunk-huge", "chunks of 2^53 bytes", changed("tenuto.json", put("chunk_bytes", 2**53))),
        ("tenuto.json", "repository/digests-none", "no digests", changed("tenuto.json", put("digests", {}))),
        ("tenuto.json", "repository/id-path", "an id that is a path", changed("tenuto.json", put("id", "../" * 10 + "xx"))),
        ("tenuto.json", "repository/id-escape", "an id that moves the cursor", changed("tenuto.json", put("id", escape))),
        (MANIFEST, "shown/environment-escape", "words that move the cursor",
         changed(MANIFEST, put("environment", {escape: escape}))),
        (MANIFEST, "shown/metric-escape", "a metric's name that moves the cursor",
         changed(MANIFEST, put("metrics", {escape: 1.0}))),
        (MANIFEST, "shown/created-escape", "a time that moves the cursor", changed(MANIFEST, put("created", escape))),
        (MANIFEST, "shown/key-escape", "a key that moves the cursor", tree({"!": "dict", "i": [[escape, escape]]})),
        (MANIFEST, "shown/enum-class", "an enum of subprocess.Popen",
         tree({"!": "tagged", "type": "subprocess.Popen", "v": ["touch", "owned"]})),
        (MANIFEST, "shown/object-class", "an object of posix.system",
         tree({"!": "object", "type": "posix.system", "v": {"!": "dict", "i": [["command", "touch owned"]]}})),
    ]  # fmt: skip


LOADS = frozenset(
    f"header/{file}"
    for file in [
        "overlap",
        "beyond-end",
        "backwards",
        "negative-offset",
        "twice",
        "metadata-twice",
        "negative-shape",
        "shape-overflow",
        "shape-of-floats",
        "shape-nan",
        "dtype-unknown",
        "dtype-object",
        "dtype-other",
        "entry-is-a-list",
        "not-utf-8",
        "lone-surrogate",
        "cut",
        "goes-on",
    ]
)
"""Lies that loading does not read: where leaves lie is in the index, and a header is only compared with its digest
there. `verify` finds them."""
HARMLESS = ("shown/", "note/", "ref/", "tombstone/", "lease/", "attempt/", "begin/")
"""Lies that concern no byte of the state: it loads, and nothing else may happen."""


def main() -> None:
    lines = []
    for place, file, lie, data in attacks():
        path = HERE / "files" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        harmless = file.startswith(HARMLESS)
        told = {"file": file, "object": place, "lie": lie, "refused": not harmless and file not in LOADS}
        lines.append({**told, "found": not harmless})
    (HERE / "attacks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
