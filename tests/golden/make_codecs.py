"""Writes a golden file for each codec that has none; what a release has written is never written again.

python tests/golden/make_codecs.py
"""

import base64
import json
from pathlib import Path

import numpy as np

from tenuto.codec import registry

HERE = Path(__file__).parent / "codecs"


def content(item: int, even: int) -> tuple[bytes, bytes]:
    """A chunk of words of `item` bytes, with a tail where an item has one, and a base near it. even: so many of the
    words are the same."""
    random = np.random.default_rng(item)
    words = (random.standard_normal(400) * 0.02).astype({1: "f4", 2: "f2", 4: "f4", 8: "f8"}[item])
    words[len(words) - even :] = 1.5
    words[:3] = -0.0, np.nan, -np.inf
    near = words * words.dtype.type(1.001)
    near[::3] = words[::3]
    if item == 1:
        words, near = ((one.view("<u4") >> 23).astype("u1") for one in (words, near))
    tail = b"\x01\x02\x03"[: item - 1]
    return words.tobytes() + tail, near.tobytes() + tail


def main() -> None:
    HERE.mkdir(exist_ok=True)
    for name in registry.names():
        path = HERE / f"{name}.json"
        if path.exists():
            continue
        codec = registry.codec(name)
        item = int(name.split("-")[0][-1]) if "-" in name else 1
        chunk, base = content(item, 200 if name.endswith("lz4") else 0)
        if name == "constant":
            chunk = (b"\x00\x00\x80\xbf" * 101)[:403]
        stored = codec.encode(memoryview(chunk), memoryview(base) if codec.needs_base else None)
        if stored is None:
            assert name == "raw", name
            stored = chunk
        parts = {"chunk": chunk, "stored": stored, **({"base": base} if codec.needs_base else {})}
        text = {what: base64.b64encode(part).decode() for what, part in parts.items()}
        path.write_text(json.dumps({"codec": name, **text}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
