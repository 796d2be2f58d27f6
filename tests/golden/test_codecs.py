"""Every later version decodes what a codec's first version stored."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from tenuto.codec import registry

FILES = sorted((Path(__file__).parent / "codecs").glob("*.json"))


def test_every_codec_has_a_file() -> None:
    assert {path.stem for path in FILES} == set(registry.names())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_was_stored_is_decoded(path: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    parts = {what: memoryview(base64.b64decode(text)) for what, text in found.items() if what != "codec"}
    out = bytearray(len(parts["chunk"]))
    registry.codec(found["codec"]).decode(parts["stored"], memoryview(out), parts.get("base"))
    assert out == parts["chunk"]
