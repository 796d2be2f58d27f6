"""P12, P14: how small lossless codecs make the state of a trained model, and how fast, on one core.

    python benchmarks/p12_codecs.py

The states are those of a small language model in mixed precision, the last one and those 1, 10 and 100 steps before
(`trained_states.py`; training takes some minutes, once). Each part of a state is cut into chunks as a save cuts it,
leaf by leaf; chunks that a codec does not shorten count as they are. Beside our codecs stand Zstandard on whole chunks
at three levels, blosc2 and OpenZL (where they are installed), and the order-0 bound: the entropy of the bytes of each
plane of a chunk, below which no code goes that knows of each byte but how often it occurs. *In one save*: the state
saved whole with `"small"`, every file of it counted, and restored.

Rates are of raw bytes through one thread, chunk after chunk; all codecs take turns, round after round.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trained_states
from harness import Contender, Result, arguments, compare, median_interval, note, report, timed

import tenuto
from campaigns.result_file import versions
from tenuto.codec import registry
from tenuto.codec.choosing import codecs_for, encoded
from tenuto.codec.contract import Codec
from tenuto.codec.derived import rounded
from tenuto.codec.digest import CHUNK_BYTES

Chunk = tuple[memoryview, memoryview | None]
ITEMS = {"weights bf16": 2, "weights fp32": 4, "moment m fp32": 4, "moment v fp32": 4}
DTYPES = {2: "bfloat16", 4: "float32"}
ROUNDS = 7


@dataclass
class Subject:
    """A codec on the chunks of one part."""

    name: str
    part: str
    encode: Callable[[Chunk], Any]
    """Returns the stored form, None where it is no shorter."""
    decode: Callable[[Any, Chunk, memoryview], None]
    chunks: list[Chunk]
    stored: list[Any] = field(default_factory=list)
    shortened: int = 0

    def __post_init__(self) -> None:
        """Encodes and decodes everything once, and checks what comes back."""
        self.stored = [self.encode(chunk) for chunk in self.chunks]
        self.out = memoryview(bytearray(max(len(raw) for raw, _ in self.chunks)))
        for made, chunk in zip(self.stored, self.chunks, strict=True):
            if made is not None:
                self.decode(made, chunk, self.out[: len(chunk[0])])
                assert self.out[: len(chunk[0])] == chunk[0], f"{self.name} does not give back {self.part}"

    @property
    def raw_bytes(self) -> int:
        return sum(len(raw) for raw, _ in self.chunks)

    @property
    def stored_bytes(self) -> int:
        pairs = zip(self.stored, self.chunks, strict=True)
        return sum(len(raw) if made is None else len(made) for made, (raw, _) in pairs)

    def encode_all(self) -> float:
        return timed(lambda: [self.encode(chunk) for chunk in self.chunks])

    def decode_all(self) -> float:
        def work() -> None:
            for made, chunk in zip(self.stored, self.chunks, strict=True):
                out = self.out[: len(chunk[0])]
                if made is None:
                    out[:] = chunk[0]
                else:
                    self.decode(made, chunk, out)

        return timed(work)


def chunks_of(tensors: dict[str, torch.Tensor], before: dict[str, torch.Tensor] | None = None) -> list[Chunk]:
    found: list[Chunk] = []
    for name, tensor in tensors.items():
        raw, base = whole(tensor), None if before is None else whole(before[name])
        for begin in range(0, len(raw), CHUNK_BYTES):
            span = slice(begin, begin + CHUNK_BYTES)
            found.append((raw[span], None if base is None else base[span]))
    return found


def whole(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def ours(name: str, part: str, chunks: list[Chunk]) -> Subject:
    codec: Codec = registry.codec(name)

    def encode(chunk: Chunk) -> bytes | None:
        return codec.encode(chunk[0], chunk[1] if codec.needs_base else None)

    def decode(made: bytes, chunk: Chunk, out: memoryview) -> None:
        codec.decode(memoryview(made), out, chunk[1] if codec.needs_base else None)

    return Subject(name, part, encode, decode, chunks)


def zstd_plain(level: int, part: str, chunks: list[Chunk]) -> Subject:
    codec = registry.codec("zstd", level)
    return Subject(
        f"zstd-{level}, whole chunks",
        part,
        lambda chunk: codec.encode(chunk[0]),
        lambda made, chunk, out: codec.decode(memoryview(made), out),
        chunks,
    )


def blosc2(part: str, chunks: list[Chunk]) -> Subject | None:
    if (module := imported("blosc2")) is None:
        return None
    module.set_nthreads(1)
    item = ITEMS[part]

    def encode(chunk: Chunk) -> bytes | None:
        made: bytes = module.compress2(
            chunk[0], typesize=item, clevel=1, codec=module.Codec.ZSTD, filters=[module.Filter.SHUFFLE], nthreads=1
        )
        return made if len(made) < len(chunk[0]) else None

    def decode(made: bytes, chunk: Chunk, out: memoryview) -> None:
        module.decompress2(made, dst=out, nthreads=1)

    return Subject("blosc2, shuffle and zstd-1", part, encode, decode, chunks)


def openzl(part: str, chunks: list[Chunk]) -> Subject | None:
    """Its own graph for floats: sign and fraction apart from exponents, these by its entropy coder."""
    if (module := imported("openzl.ext")) is None:
        return None
    graphs, nodes = module.graphs, module.nodes
    compressor = module.Compressor()
    compressor.set_parameter(module.CParam.FormatVersion, module.MAX_FORMAT_VERSION)
    for checksum in (module.CParam.CompressedChecksum, module.CParam.ContentChecksum):
        compressor.set_parameter(checksum, 2)  # off: our digests are elsewhere too
    words, apart = {
        2: (nodes.ConvertSerialToNumLE16, nodes.BFloat16Deconstruct),
        4: (nodes.ConvertSerialToNumLE32, nodes.Float32Deconstruct),
    }[ITEMS[part]]
    cut = apart()(compressor, graphs.Store()(compressor), graphs.Huffman()(compressor))
    compressor.select_starting_graph(words()(compressor, cut))

    def encode(chunk: Chunk) -> bytes | None:
        context = module.CCtx()
        context.ref_compressor(compressor)
        given = bytes(chunk[0])  # nothing but us keeps it alive until it is compressed
        made: bytes = context.compress([module.Input(module.Type.Serial, given)])
        return made if len(made) < len(chunk[0]) else None

    def decode(made: bytes, chunk: Chunk, out: memoryview) -> None:
        out[:] = memoryview(module.DCtx().decompress(made)[0].content.as_nparray())

    return Subject("OpenZL, exponents by Huffman", part, encode, decode, chunks)


def imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def bound(part: str, difference: str, chunks: Iterable[Chunk]) -> float:
    """Bytes below which no code of the bytes of each plane of a chunk goes that knows their frequencies alone."""
    item = ITEMS[part]
    codec = registry.codec(f"{difference}{item}-zstd")
    bits = 0.0
    for raw, base in chunks:
        count = len(raw) // item
        if not count:
            continue
        words, *rest = (np.empty(count, f"<u{item}") for _ in range(3))
        from_base = None if not codec.needs_base or base is None else np.frombuffer(base, words.dtype, count)
        codec._difference.forward(np.frombuffer(raw, words.dtype, count), from_base, words, (rest[0], rest[1]))
        for plane in words.view(np.uint8).reshape(count, item).T:
            shares = np.bincount(plane) / count
            bits -= count * float((shares[shares > 0] * np.log2(shares[shares > 0])).sum())
    return bits / 8


def subjects(states: dict[int, trained_states.State]) -> tuple[list[Subject], dict[str, dict[str, float]]]:
    """Returns the codecs on each part, and the bounds on each part by difference, as shares of its bytes."""
    found: list[Subject | None] = []
    bounds: dict[str, dict[str, float]] = {}
    for part in trained_states.PARTS:
        plain = chunks_of(states[0][part])
        item, size = ITEMS[part], sum(len(raw) for raw, _ in plain)
        found += [ours(name, part, plain) for name in (f"planes{item}-zstd", f"planes{item}-lz4")]
        found += [zstd_plain(level, part, plain) for level in (1, 3, 9)]
        found += [blosc2(part, plain), openzl(part, plain)]
        bounds[part] = {"planes": bound(part, "planes", plain) / size}
        for gap in sorted(set(states) - {0}):
            chunks = chunks_of(states[0][part], states[gap][part])
            since = f"{part}, {gap} step{'s' * (gap > 1)} on"
            bounds[since] = {}
            for difference in ("delta", "xor"):
                found.append(ours(f"{difference}{item}-zstd", since, chunks))
                bounds[since][difference] = bound(part, difference, chunks) / size
            xored = [(memoryview(np.frombuffer(a, np.uint8) ^ np.frombuffer(b, np.uint8)), None) for a, b in chunks]
            found.append(zstd_plain(1, since, xored))
            found[-1].name = "zstd-1 of XOR"
    return [one for one in found if one is not None], bounds


def whole_states(states: dict[int, trained_states.State]) -> dict[str, float]:
    """How many times fewer bytes a whole state takes, each leaf by the codec that suits its dtype; and how many where
    the base of the bf16 weights is the rounding of the fp32 weights beside them."""
    found = {}
    roundings = {
        name: torch.frombuffer(bytearray(rounded(whole(master), "bfloat16")), dtype=torch.bfloat16)
        for name, master in states[0]["weights fp32"].items()
    }
    for gap in sorted(states):
        stored = {
            part: _stored(tensors, states[gap][part] if gap else None, DTYPES[ITEMS[part]])
            for part, tensors in states[0].items()
        }
        raw = sum(tensor.nbytes for part in states[0].values() for tensor in part.values())
        what = f"{gap} step{'s' * (gap > 1)} on" if gap else "by itself"
        found[what] = raw / sum(stored.values())
        stored["weights bf16"] = _stored(states[0]["weights bf16"], roundings, "bfloat16")
        found[f"{what}, bf16 weights derived from fp32"] = raw / sum(stored.values())
    return found | {"in one save": in_one_save(states[0])}


def in_one_save(state: trained_states.State) -> float:
    """How many times fewer bytes a save with `"small"` puts, its index and manifest among them, than the state has."""
    with tempfile.TemporaryDirectory() as place:
        tenuto.save(state, place, step=1, encoding="small")
        put = sum(path.stat().st_size for path in Path(place).glob("runs/main/a0001/*/*"))
        found = tenuto.load(place).state
    for part, tensors in state.items():
        assert all(torch.equal(found[part][name], tensor) for name, tensor in tensors.items()), f"{part}: other bits"
    return sum(tensor.nbytes for part in state.values() for tensor in part.values()) / put


def _stored(tensors: dict[str, torch.Tensor], before: dict[str, torch.Tensor] | None, dtype: str) -> int:
    suited = codecs_for(dtype)
    tried = [registry.codec(name) for name in (suited.plain[0], suited.deltas[0])]
    return sum(min(len(encoded(raw, (each,), base)[1]) for each in tried) for raw, base in chunks_of(tensors, before))


def judge(result: Result, made: list[Subject], wholes: dict[str, float], seconds: dict[str, list[float]]) -> None:
    by_name = {(one.name, one.part): one for one in made}

    def ratio(text: str, value: float, at_least: float) -> None:
        result.judge_value(text, (value, value, value), at_least=at_least)

    for part, limit in (("weights bf16", 1.5), ("weights fp32", 1.2)):
        one = by_name[f"planes{ITEMS[part]}-zstd", part]
        ratio(f"{part}: ratio >= {limit}", one.raw_bytes / one.stored_bytes, limit)
    ratio("whole state in one save: ratio >= 1.4", wholes["in one save"], 1.4)
    if "1 step on" in wholes:
        ratio("whole state 1 step on: ratio >= 1.6", wholes["1 step on"], 1.6)
    one = by_name["planes2-zstd", "weights bf16"]
    for way, limit in (("encode", 1.0), ("decode", 1.6)):
        rates = [one.raw_bytes / each / 1e9 for each in seconds[f"{way}: {one.name}, {one.part}"]]
        result.judge_value(f"{way} of bf16 >= {limit} GB/s on one core", median_interval(rates), at_least=limit)


def main() -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--steps", type=int, default=700, help="steps of training (default %(default)d)")

    options = arguments(__doc__ or "", add=add, rounds=ROUNDS)
    torch.set_num_threads(1)
    states = trained_states.states(options.steps, kept=Path(options.where or trained_states.KEPT))
    made, bounds = subjects(states)
    timing = [
        Contender(f"{way}: {one.name}, {one.part}", measure)
        for one in made
        for way, measure in (("encode", one.encode_all), ("decode", one.decode_all))
    ]
    seconds = compare(timing, rounds=options.rounds, own="", note=note)
    wholes = whole_states(states)
    options.leaves = sum(map(len, states[0].values()))
    size = sum(tensor.nbytes for part in states[0].values() for tensor in part.values())
    table: dict[str, dict[str, Any]] = {}
    for one in made:
        table.setdefault(one.part, {})[one.name] = {
            "ratio": round(one.raw_bytes / one.stored_bytes, 4),
            "stored_share": round(one.stored_bytes / one.raw_bytes, 4),
        } | {
            f"{way}_gb_s{kind}": round(one.raw_bytes / pick(seconds[f"{way}: {one.name}, {one.part}"]) / 1e9, 3)
            for way in ("encode", "decode")
            for kind, pick in (("", np.median), ("_best", min))
        }
    facts = {
        "training": {"steps": options.steps, "gaps": sorted(set(states) - {0})},
        "codecs": table,
        "order_0_bound_share": {
            part: {how: round(one, 4) for how, one in found.items()} for part, found in bounds.items()
        },
        "stored_share": {f"{one.name}, {one.part}": one.stored_bytes / one.raw_bytes for one in made},
        "whole_state_ratio": {what: round(value, 4) for what, value in wholes.items()},
        "compressors": versions("backports.zstd", "lz4", "blosc2", "openzl"),
    }
    result = Result("p12_codecs", seconds, size, facts, speeds=False)
    judge(result, made, wholes, seconds)
    report(result, options, Path(__file__).parent)


if __name__ == "__main__":
    main()
