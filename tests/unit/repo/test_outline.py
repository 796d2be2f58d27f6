"""A leaf found in the tree's text is the leaf that reading the whole tree finds; whatever is odd is left to that."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import tenuto
from tenuto.engine.read.outline import read_outline
from tenuto.errors import CheckpointNotFound, CorruptionError
from tenuto.model import canonical_json
from tenuto.model.health import Health
from tenuto.model.ids import CheckpointId
from tenuto.model.records import IndexEntry, Manifest
from tenuto.repo.format.manifest import (
    Aborted,
    Summary,
    decode_manifest,
    decode_outline,
    decode_summary,
    encode_aborted,
    encode_manifest,
)
from tenuto.repo.format.tree_scan import TreeText
from tenuto.repo.repository import Repo
from tenuto.state.encode.flattener import flatten
from tenuto.state.tree import leaf_nodes
from tenuto.store.registry import open_store

ID = CheckpointId("gpt", 3, 500)
OURS = "9" * 32

keys = st.sampled_from(
    ["a", "b", "tree", "a/b", "", "#i:3", "~1", "é", '"], [{', "\\", "x\n", ",", 'i":[', 3, -3, True, None]
)
states = st.recursive(
    st.sampled_from([0, 1.5, "[{", '"', None, (), float("nan")]) | st.builds(lambda: np.zeros(1)),
    lambda inner: st.dictionaries(keys, inner, max_size=4) | st.lists(inner, max_size=3),
    max_leaves=10,
).map(lambda found: {"root": found, "w": np.zeros(2)})


@settings(derandomize=True, deadline=None, max_examples=50)
@given(states, st.sampled_from([1, 7, 1 << 16]))
def test_a_leaf_found_in_the_text_is_the_one_in_the_tree(state: Any, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tenuto.repo.format.tree_scan._BLOCK", block)
        assert_found_as_in(flatten(state).tree)


def assert_found_as_in(tree: Any) -> None:
    """Looking a path up in the tree's text finds what the tree has there, or says that it cannot tell."""
    quick = TreeText(canonical_json.dumps(tree))
    known = dict(leaf_nodes(tree))
    for path, node in known.items():
        assert quick.find(path) in (node, None)
    for path in ("", "root", "w/0", "root/a", "root/a/b", "root/a~1b", "root/#s:", "root/~1", "root/#i:03", "nothing"):
        assert quick.find(path) in (known.get(path), None)
    assert quick.find("w") == known["w"]


def test_usual_leaves_are_found_without_the_tree() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tree = flatten({"model": model, "optimizer": optimizer, "odd [{": {3: torch.ones(1), "é": torch.ones(1)}}).tree
    quick = TreeText(canonical_json.dumps(tree))
    assert {path: quick.find(path) for path, _ in leaf_nodes(tree)} == dict(leaf_nodes(tree))


def leaf(number: int) -> Any:
    return {"!": "leaf", "as": "numpy", "n": number}


def test_two_at_one_path_are_left_to_the_strict_way() -> None:
    twice = {"!": "dict", "i": [["a", leaf(0)], ["b", leaf(1)], ["a", leaf(2)]]}
    quick = TreeText(canonical_json.dumps(twice))
    assert (quick.find("a"), quick.find("b")) == (None, leaf(1))
    text = (
        canonical_json.dumps({"!": "dict", "i": [["a", leaf(0)]]})[:-1]
        + b',"i":[["a",{"!":"leaf","as":"numpy","n":1}]]}'
    )
    assert TreeText(text).find("a") is None


def test_what_a_subclass_says_of_itself_is_no_leaf() -> None:
    node = {"!": "subclass", "context": [["x", leaf(7)]], "i": [["y", leaf(0)]], "type": "T"}
    assert TreeText(canonical_json.dumps({"!": "dict", "i": [["s", node]]})).find("s/x") is None
    assert TreeText(canonical_json.dumps({"!": "dict", "i": [["s", node]]})).find("s/y") == leaf(0)


@pytest.mark.parametrize("text", [b"", b"5", b'"a"', b"[],5", b"[]]", b"[[]", b'{"a":1},{"b":2}', b'["]"', b'{}"'])
def test_text_that_is_no_single_value_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        TreeText(text)


def test_a_deep_text_is_refused() -> None:
    with pytest.raises(CorruptionError, match="deep"):
        TreeText(b"[" * 500 + b"]" * 500)


def manifest(tree: Any, **more: Any) -> Manifest:
    entry = IndexEntry("rank-00000.index", 100, bytes(16))
    return Manifest(ID, "ab" * 16, tree, (entry,), "cd" * 32, 5, 1, 1024, **more)


@pytest.mark.parametrize(
    "tree", [{"!": "dict", "i": [["tree", leaf(0)]]}, 5, "text", [leaf(0)], {"!": "dict", "i": [["x", 'a,"tree":']]}]
)
def test_the_outline_says_what_the_manifest_says(tree: Any) -> None:
    whole = manifest(tree, progress={"step": 5, "tree": {"a": 1, "tree": 2}}, metrics={"loss": float("nan"), "a": 0.5})
    data = encode_manifest(whole, OURS)
    found = decode_outline(data, ID, OURS)
    assert found is not None
    assert data[found[1] : found[2]] == canonical_json.dumps(tree)
    assert repr(replace(found[0], tree=tree)) == repr(decode_manifest(data, ID, OURS))


HEALTHY = Health(0, (), 0, 1.5, 0.25)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"metrics": {"loss": 0.5, "steps": 3, "é": -1e300}, "certificate": {"modes": {"loss": "min"}, "n": [None]}},
        {"health": HEALTHY, "stored": 3, "created": "2026-01-31T12:00:00Z", "parent": CheckpointId("gpt", 2, 400)},
        {"health": Health(2, ("w",), 7, float("inf"), None)},
    ],
)
def test_the_summary_says_what_the_manifest_says(more: dict[str, Any]) -> None:
    data = encode_manifest(manifest({"!": "dict", "i": [["tree", leaf(0)]]}, **more), OURS)
    whole = decode_manifest(data, ID, OURS)
    assert isinstance(whole, Manifest)
    assert repr(decode_summary(data, ID, OURS)) == repr(Summary.of(whole))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("bytes", "5"), ("bytes", -1), ("bytes", True), ("bytes", 2**53 + 1), ("leaves", None), ("stored", 1.0)),
        *(("created", 5), ("metrics", {"loss": "0.5"}), ("metrics", {"loss": True}), ("metrics", [])),
        *(("metrics", {"loss": {"!": "float", "v": "nan"}}), ("certificate", 5), ("indexes", []), ("indexes", {})),
        *(("health", {}), ("health", 5), ("run", "other"), ("attempt", 4), ("step", 501), ("repository", "8" * 32)),
        *(("format", 3), ("kind", "begin"), ("path", "runs/x"), ("progress", {"a": 1, "tree": {"b": 2}})),
    ],
)
def test_what_no_save_writes_has_no_summary(key: str, value: Any) -> None:
    body = _newer(encode_manifest(manifest(5), OURS))
    del body["writer"]
    spelled = json.dumps({**body, key: value}, sort_keys=True, separators=(",", ":")).encode()[:-1]
    data = spelled + b',"digest":"' + xxhash.xxh3_128_hexdigest(spelled).encode() + b'"}'
    canonical_json.check_seal(data, name="it is sealed")
    assert decode_summary(data, ID, OURS) is None


def test_nothing_damaged_has_a_summary() -> None:
    assert decode_summary(encode_aborted(Aborted(ID, "ab" * 16, "me"), OURS), ID, OURS) is None
    data = encode_manifest(manifest(5), OURS)
    for place in range(0, len(data), 7):
        broken = bytearray(data)
        broken[place] ^= 4
        assert decode_summary(bytes(broken), ID, OURS) is None
    assert decode_summary(b"", ID, OURS) is None


def test_the_outline_of_what_is_no_plain_manifest() -> None:
    assert decode_outline(encode_aborted(Aborted(ID, "ab" * 16, "me"), OURS), ID, OURS) is None
    data = encode_manifest(manifest(5), OURS)
    assert decode_outline(data, CheckpointId("gpt", 3, 501), OURS) is None
    for place in range(0, len(data), 7):
        broken = bytearray(data)
        broken[place] ^= 4
        with pytest.raises(CorruptionError):
            decode_outline(bytes(broken), ID, OURS)


def _newer(data: bytes) -> dict[str, Any]:
    body = {key: value for key, value in canonical_json.loads(data).items() if key != "digest"}
    return {**body, "writer": "newer"}


def test_a_newer_writers_further_keys_are_passed_over(tmp_path: Any) -> None:
    """The text behind the tree's key is no single value then: the whole manifest is read."""
    repo, id = _made(tmp_path)
    name = tmp_path / id.manifest
    name.write_bytes(canonical_json.seal(_newer(name.read_bytes())))
    outline = read_outline(repo, id)
    found = outline.find("model/w")
    assert found is not None and found[0] == 0 and list(outline.leaves()) == ["model/w", "b"]


def test_a_tree_that_does_not_fit_the_rows_is_refused_when_it_is_read(tmp_path: Any) -> None:
    repo, id = _made(tmp_path)
    name = tmp_path / id.manifest
    body = _newer(name.read_bytes())
    del body["writer"]
    body["tree"] = {"!": "dict", "i": [["a", leaf(0)], ["b", leaf(5)]]}
    name.write_bytes(canonical_json.seal(body))
    outline = read_outline(repo, id)
    assert outline.find("a") is not None
    with pytest.raises(CorruptionError, match="names leaf 5 of 2"):
        outline.find("b")
    with pytest.raises(CorruptionError, match="not what a save writes"):
        outline.leaves()


def test_no_manifest_and_no_index(tmp_path: Any) -> None:
    repo, id = _made(tmp_path)
    with pytest.raises(CheckpointNotFound):
        read_outline(repo, CheckpointId("main", 1, 6))
    (tmp_path / id.directory / "rank-00000.index").unlink()
    with pytest.raises(CorruptionError, match="is missing"):
        read_outline(repo, id)


def _made(place: Any) -> tuple[Repo, CheckpointId]:
    saved = tenuto.save({"model": {"w": np.ones(3)}, "b": np.zeros(2)}, place, step=5)
    return Repo.open(open_store(place)), saved.id
