"""The tables of measured figures, made from the committed results and nothing else.

    python benchmarks/table.py            # writes benchmarks/RESULTS.md, and six of its rows into README.md
    python benchmarks/table.py --check    # fails where either says something else

A row whose result is not there is left out. RESULTS.md lists every missed target below the tables.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
README = HERE.parent / "README.md"
PAGE = HERE / "RESULTS.md"
IN_README = ("p1_stall_1gib", "p2_fenced_1gib", "p4_sync_save_4gib", "p5_restore_cold_1gib", "p9_restart_1gib")
IN_README_OF_RANKS = ("ranks_durable_4_1gib",)
BEGIN = "<!-- measured: made by benchmarks/table.py from benchmarks/results; edit neither by hand -->"
END = "<!-- end of what is measured -->"
MIB = 1 << 20
UNITS = {"ratio": "", "ms": "ms", "us": "us", "mib": "MiB", "done": ""}
"""What a target's figure may be, by its key in a result."""

SIZES = ("_0.1gib", "_1gib", "_4gib")
TRAINER_SIZES = ("_0.2gib", "_1gib")
CONVERTED_SIZES = ("_0.25gib", "_0.5gib", "_1gib")
RANKS = (2, 4)
UNSIZED = ("", *SIZES)
"""Of a benchmark that was once measured at one size alone."""

Document = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """`own`: Tenuto's figure in the result, and what is said beside it; `beside`: others' figures and their words.

    `{gib}` in `what` is the state's size. `figures`: "median_s", "median_bytes", "share_lost" or "stored_share".
    """

    id: str
    what: str
    own: str
    beside: Sequence[tuple[str, str]]
    reference: tuple[str, str] | None = None
    figures: str = "median_s"

    def shown(self, documents: dict[str, Document]) -> bool:
        """Whether its figure is there: a benchmark may leave some contenders out."""
        return self.id in documents and self.own in documents[self.id].get(self.figures, {})


def rows() -> list[Row]:
    return [
        *(_stall(f"p1_stall{size}") for size in SIZES),
        *(_fenced(f"p2_fenced{size}") for size in SIZES),
        *(row for size in SIZES for row in _on_a_gpu(f"cuda_stall{size}")),
        *(row for size in UNSIZED for row in _overhead(f"p3_overhead{size}")),
        *(row for size in ("_0.03gib", *SIZES) for row in _everyday(f"p3_everyday{size}")),
        *(_durable(f"p4_sync_save{size}") for size in SIZES),
        *_restores(),
        *_small(),
        *_lazy(),
        *(row for size in UNSIZED for row in _memory(f"p8_memory{size}")),
        *(_restart(f"p9_restart{size}") for size in SIZES),
        _planning(),
        *_upkeep(),
        *_space(),
        *_codecs(),
        *_object_store(),
        *_starting(),
        *(row for size in TRAINER_SIZES for row in _trainers(f"trainers{size}")),
        *(row for size in CONVERTED_SIZES for row in _conversions(f"convert{size}")),
    ]


ASYNC = (("dcp.async_save, thread", "`dcp.async_save` (thread)"), ("dcp.async_save, process", "(process)"))
TORCH = ("torch.save", "`torch.save`")
COPY = ("memcpy", "one copy in memory")


def _stall(id: str) -> Row:
    what = "training blocked by an asynchronous save, {gib} GiB"
    return Row(id, what, "tenuto save()", (*ASYNC, TORCH), COPY)


def _fenced(id: str) -> Row:
    what = "training blocked by a fenced save, {gib} GiB"
    beside = (("tenuto save(), eager", "eager"), *ASYNC, TORCH)
    return Row(id, what, "tenuto save(), fenced", beside, COPY)


def _on_a_gpu(id: str) -> list[Row]:
    pinned = ("copy to pinned memory", "one copy into pinned memory")
    beside = (("dcp.async_save, thread", "`dcp.async_save` (thread)"), TORCH)
    loads = (
        ("torch.load(mmap, map_location=cuda)", "`torch.load(mmap=True)`"),
        ("dcp.load into the device", "`dcp.load`"),
    )
    return [
        Row(id, "training on a GPU blocked by a save, {gib} GiB", "tenuto save(), eager", beside, pinned),
        Row(id, "training on a GPU blocked by a fenced save, {gib} GiB", "tenuto save(), fenced", beside, pinned),
        Row(id, "restore onto a GPU, every byte verified, {gib} GiB", "tenuto.load into the device", loads),
    ]


def _overhead(id: str) -> list[Row]:
    beside = tuple((f"lost to a {name}", words) for name, words in ASYNC)
    what = "training time lost to a {kind}save, all cores busy, {{gib}} GiB"
    return [
        Row(id, what.format(kind=""), "lost to a tenuto save()", beside, COPY),
        Row(id, what.format(kind="fenced "), "lost to a tenuto save(), fenced", beside, COPY),
    ]


def _everyday(id: str) -> list[Row]:
    beside = (("dcp.async_save, thread, disk", "`dcp.async_save` (thread), to disk alone"),)
    what = "training time lost to every step in memory and every tenth on disk{kind}, {{gib}} GiB"
    return [
        Row(id, what.format(kind=kind), f"tenuto, memory and disk{kind}", beside, None, "share_lost")
        for kind in ("", ", fenced")
    ]


def _durable(id: str) -> Row:
    return Row(
        id,
        "durable save, flushed and digested, {gib} GiB",
        "tenuto save(wait=True)",
        (
            ("tenuto.save, one-off", "one-off `tenuto.save`"),
            ("torch.save + fsync", "`torch.save` + fsync"),
            ("dcp.save", "`dcp.save`"),
            ("safetensors + fsync", "safetensors + fsync"),
            ("torch_checkpointing + fsync", "torch_checkpointing + fsync"),
        ),
        ("raw O_DIRECT write", "raw direct write"),
    )


def _restart(id: str) -> Row:
    return Row(
        id,
        "restore from memory after `kill -9`, every byte verified, {gib} GiB",
        "restore() from memory, one thread",
        (("torch.load + copy, cold disk", "`torch.load` from a cold disk"),),
        ("memcpy, one thread", "one copy by one thread"),
    )


def _restores() -> list[Row]:
    found: list[Row] = []
    for heat, words, reference in (
        ("hot", "from the page cache", COPY),
        ("cold", "from a cold disk", ("raw O_DIRECT read", "raw direct read")),
    ):
        found += [_restored(f"p5_restore_{heat}{size}", words, reference) for size in SIZES]
    return found


def _restored(id: str, words: str, reference: tuple[str, str] | None) -> Row:
    return Row(
        id,
        f"restore {words}, every byte verified, {{gib}} GiB",
        "tenuto.load",
        (
            ("dcp.load", "`dcp.load`"),
            ("torch.load + copy", "`torch.load`"),
            ("torch.load(mmap) + copy", "`torch.load(mmap=True)`"),
            ("safetensors + copy", "safetensors"),
        ),
        reference,
    )


def _small() -> list[Row]:
    saves = ("torch.save + fsync", "dcp.save", "safetensors + fsync")
    loads = ("torch.load + copy", "dcp.load", "safetensors + copy")
    words = {name: name if name.startswith("safetensors") else f"`{name.split(' +')[0]}`" for name in (*saves, *loads)}
    return [
        Row(
            "p7_small",
            "durable save of 10,000 tensors of 1 KiB",
            "tenuto save(wait=True)",
            tuple((name, words[name]) for name in saves),
            ("tenuto.save, one-off", "one-off"),
        ),
        Row(
            "p7_small",
            "restore of 10,000 tensors of 1 KiB",
            "tenuto.load",
            tuple((name, words[name]) for name in loads),
        ),
    ]


def _lazy() -> list[Row]:
    found = []
    for what, own, peers in (
        ("opening a checkpoint of 10,000 tensors", "open", ("torch.load(mmap)", "safetensors")),
        ("its first tensor", "first tensor", ("torch.load(mmap)", "safetensors", "dcp")),
    ):
        for heat, words in (("hot", "in the page cache"), ("cold", "cold")):
            beside = tuple((f"{one}: {own}, {heat}", _NAMES[one]) for one in peers)
            found.append(Row("p6_lazy", f"{what}, {words}", f"tenuto: {own}, {heat}", beside))
    return found


_NAMES = {"torch.load(mmap)": "`torch.load(mmap=True)`", "safetensors": "safetensors", "dcp": "`dcp.load`"}


def _memory(id: str) -> list[Row]:
    saves = ("dcp.async_save, thread", "dcp.async_save, process")
    loads = ("torch.load + copy", "dcp.load", "safetensors + copy")
    words = {one: f"`{one.replace(', ', '` (')})" for one in saves}
    held = tuple((f"{one}: held", words[one]) for one in saves)
    cached = (f"{saves[0]}: with page cache", "with its page cache")
    from_files = tuple((f"{one}: held", f"`{one.removesuffix(' + copy')}`") for one in loads)
    one_off = ("tenuto.save, one-off: held", "one-off `tenuto.save`")
    return [
        Row(id, what, own, beside, reference, "median_bytes")
        for what, own, beside, reference in (
            (
                "memory of an asynchronous save above the training's own, {gib} GiB",
                "tenuto.Checkpointer: held",
                (*held, cached),
                one_off,
            ),
            (
                "memory of saves with two states kept in memory above the training's own, {gib} GiB",
                "tenuto.Checkpointer, memory tier: held",
                held,
                None,
            ),
            ("memory of a restore above its destination, {gib} GiB", "tenuto.load: held", from_files, None),
            (
                "memory of a restore from memory above its destination, {gib} GiB",
                "restore() from memory, tenuto: held",
                from_files,
                None,
            ),
        )
    ]


def _upkeep() -> list[Row]:
    verifying = (
        ("restic check, page cache", "`restic check --read-data`"),
        ("borg check, page cache", "`borg check --verify-data`"),
    )
    upkeep, history = "p19_upkeep_1gib", "p20_history"
    deciding = (("restic forget --dry-run", "`restic forget`"), ("borg prune --dry-run", "`borg prune`"))
    listing = (("restic snapshots", "`restic snapshots`"), ("borg list", "`borg list`"), ("dvc list", "`dvc list`"))
    copy = ("one copy, one thread", "one copy")
    return [
        Row(upkeep, "comparing two checkpoints of {gib} GiB value by value", "diff", (), copy),
        Row(
            upkeep,
            "verifying every byte in the page cache, {gib} GiB",
            "verify, page cache",
            verifying,
            ("raw read, page cache", "raw read"),
        ),
        Row(
            upkeep,
            "verifying every byte on a cold disk, {gib} GiB",
            "verify, cold disk",
            (),
            ("raw O_DIRECT read", "raw direct read"),
        ),
        Row(
            upkeep,
            "norms and extremes of all values beside their digests, {gib} GiB, one thread",
            "statistics of values",
            (("whether finite", "whether they are finite alone"),),
            copy,
        ),
        Row(
            history,
            "what gc would free among 1,000 checkpoints with 1,000,000 chunks",
            "gc plans, 1,000,000 chunks",
            (),
        ),
        Row(history, "what a rule would remove of 40 saves, as a command", "tenuto keep --dry-run", deciding),
        Row(history, "a list of 40 saves, as a command", "tenuto ls", listing),
    ]


def _planning() -> Row:
    first = "first plan, rows and columns: {} leaves, {} ranks"
    return Row(
        "p11_planning",
        "planning who writes which of 1,000,000 shards, proved to be complete, for 1,000 ranks",
        first.format(1000, 1000),
        ((first.format(62, 16_000), "for 16,000 ranks"),),
        ("cached plan of one rank, rows and columns", "planned before"),
    )


def _codecs() -> list[Row]:
    others = (
        "zstd-1, whole chunks",
        "zstd-9, whole chunks",
        "blosc2, shuffle and zstd-1",
        "OpenZL, exponents by Huffman",
    )
    words = dict(zip(others, ("zstd-1", "zstd-9", "blosc2", "OpenZL"), strict=True))
    parts = (("weights bf16", "planes2-zstd"), ("weights fp32", "planes4-zstd"), ("moment v fp32", "planes4-zstd"))

    def row(part: str, own: str, begin: str, what: str, figures: str, beside: Sequence[str]) -> Row:
        named = tuple((f"{begin}{one}, {part}", words.get(one, one)) for one in beside)
        return Row("p12_codecs", what, f"{begin}{own}, {part}", named, None, figures)

    def on(part: str) -> str:
        return part.replace("moment v", "second moments of Adam,").replace("steps on", "steps after their base")

    later = (("weights bf16, 10 steps on", "delta2-zstd"), ("weights fp32, 10 steps on", "delta4-zstd"))
    return [
        *(row(part, own, "", f"stored of trained {on(part)}", "stored_share", others) for part, own in parts),
        *(row(part, own, "", f"stored of {on(part)}", "stored_share", ("zstd-1 of XOR",)) for part, own in later),
        *(
            row(*parts[0], f"{way}: ", f"{way[:-1]}ing 4.7 MiB of bf16 weights on one core", "median_s", others)
            for way in ("encode", "decode")
        ),
    ]


def _space() -> list[Row]:
    """What a save puts, index and manifest counted in, and how long it takes."""
    found = []
    for gap in (1, 10):
        for kind, words in (
            ("adapters", "adapters on a frozen model"),
            ("full", "a full fine-tune"),
            ("head", "a head on a frozen embedding"),
            ("experts", "16 experts, a few in use"),
        ):
            begin, after = f"{kind}, gap {gap}: ", f"{words}, {gap} step{'s' if gap > 1 else ''} after the last save"
            for figures, what, end in (
                ("median_bytes", "put by a save of", "put by a save"),
                ("median_s", 'durable save, `encoding="small"`, of', "save"),
            ):
                beside = tuple((f"{begin}{name}: {end}", f'`"{name}"`') for name in ("dedupe", "auto", "plain"))
                found.append(Row("p13_space", f"{what} {after}", f"{begin}small: {end}", beside, None, figures))
    for kind, words in (("adapters", "adapters on a frozen model"), ("full", "a full fine-tune")):
        for what, end in (("durable save into", "save"), ("restore from", "restore")):
            beside = tuple((f"{kind}: {name}: {end}", f'`"{name}"`') for name in ("dedupe", "plain"))
            where = f'{what} a sealed repository in a bucket, `encoding="small"`, of {words}'
            found.append(Row("p18_sealed_bucket", where, f"{kind}: small: {end}", beside))
    return found


def _object_store() -> list[Row]:
    id, bucket = "p22_object_store", "a bucket of a Ceph gateway"
    latest = "latest of 10,000, its lease names "
    stripe = "{}, emulated, {} of them"
    return [
        Row(id, f"draining a checkpoint of 128 MiB into {bucket}", "tenuto, drain", (), ("plain puts", "plain puts")),
        Row(
            id,
            f"one-off durable save of 128 MiB into {bucket}",
            "tenuto.save",
            (("dcp.save, s3fs", "`dcp.save` with s3fs"),),
            ("plain puts", "plain puts"),
        ),
        Row(
            id,
            f"restore of 128 MiB from {bucket}, every byte verified",
            "tenuto.load",
            (("dcp.load, s3fs", "`dcp.load` with s3fs"),),
            ("plain gets", "plain gets"),
        ),
        Row(
            id,
            "a step of a training while a tier in a bucket is filled",
            "a step while a tier is filled",
            (("a step beside", "a step beside"),),
        ),
        Row(
            id,
            "what `latest` means in a bucket with 10,000 checkpoints, 100 ms away",
            f"{latest}it",
            ((f"{latest}an older one", "where the last lease is old"),),
        ),
        Row(
            id,
            "memory of draining 4 GiB into a bucket",
            "tenuto, drain",
            (("tenuto.save", "one-off `tenuto.save`"), ("tenuto.save into a directory", "the same into a directory")),
            None,
            "median_bytes",
        ),
        *(
            Row(
                "stripe",
                f"{words} 64 MiB {over} a stripe of four places of 30 MB/s each",
                stripe.format(way, 4),
                ((stripe.format(way, 1), "one such place"),),
            )
            for way, words, over in (("put", "putting", "into"), ("get", "reading", "from"))
        ),
    ]


def _trainers(id: str) -> list[Row]:
    own = {
        "a loop": (("torch.save", "`torch.save`"),),
        "Lightning": (
            ("ModelCheckpoint", "`ModelCheckpoint`"),
            ("ModelCheckpoint, AsyncCheckpointIO", "with `AsyncCheckpointIO`"),
        ),
        "Hugging Face": (("save_strategy", "the Trainer's own"),),
        "Accelerate": (("save_state", "`save_state`"),),
        "Keras": (("ModelCheckpoint", "`ModelCheckpoint`"),),
    }
    stalls = [
        Row(
            id,
            f"training held by a save: {name}, {{gib}} GiB",
            f"{name}: tenuto",
            tuple((f"{name}: {one}", words) for one, words in beside),
        )
        for name, beside in own.items()
    ]
    steps = [
        Row(
            id,
            f"added to a step that saves nothing: {name}, processor time",
            f"{name}: added to a step",
            ((f"{name}: step", "the step itself"),),
        )
        for name in own
    ]
    return stalls + steps


def _starting() -> list[Row]:
    loads, plain = (("torch.load of a small state", "torch and `torch.load`"),), ("import numpy", "numpy alone")
    return [
        Row("p23_starting", "a process that imports a `Checkpointer`", "tenuto.Checkpointer", (), plain),
        Row("p23_starting", "a process that loads a small state", "tenuto.load of a small state", loads, plain),
        Row("p23_starting", "`tenuto --version`", "tenuto --version", (), plain),
    ]


def _conversions(id: str) -> list[Row]:
    words = {
        "import of safetensors": "`tenuto import` of a safetensors file",
        "import, rounded to bfloat16": "the same, rounded to bfloat16",
        **{f"export to {one}": f"`tenuto export --to {one}`" for one in ("safetensors", "hf", "npz", "gguf")},
    }
    copy = (("copy + fsync", "a plain copy of the file, flushed"),)
    return [Row(id, f"{what}, {{gib}} GiB", name, copy) for name, what in words.items()]


def rows_of_ranks() -> list[Row]:
    """Of jobs of several processes; each figure is the slowest rank's."""
    return [row for ranks in RANKS for size in SIZES for row in _of_ranks(ranks, size)] + _reshards()


def _reshards() -> list[Row]:
    """Of three savers and two readers."""
    caches = (("hot", "from the page cache"), ("cold", "from a cold disk"))
    onto = (("rows", "rows"), ("columns", "columns"), ("replicas", "all of it on each"))
    return [
        Row(
            f"p10_reshard_3to2_{cache}_1gib",
            f"rows of 3 ranks restored on 2 as {words}, {heat}, {{gib}} GiB",
            f"{layout}: resharded",
            ((f"{layout}: resharded, dcp.load", "`dcp.load`"),),
            (f"{layout}: same layout", "saved as it is restored"),
        )
        for cache, heat in caches
        for layout, words in onto
    ]


def _of_ranks(ranks: int, size: str) -> list[Row]:
    def alike(row: Row, what: str, reference: tuple[str, str] | None, own: str = "") -> Row:
        """The row of one process, for several."""
        id = f"ranks_{what}_{ranks}{size}"
        return replace(row, id=id, what=f"{ranks} ranks: {row.what}", own=own or row.own, reference=reference)

    copy, write = ("memcpy", "all ranks copying"), ("raw O_DIRECT write", "raw direct writes")
    restores = (
        alike(row, f"restore_{heat}", reference, "tenuto restore()")
        for row, heat, reference in (
            (_restored("", "from the page cache", COPY), "hot", copy),
            (_restored("", "from a cold disk", None), "cold", ("raw O_DIRECT read", "raw direct reads")),
        )
    )
    return [
        alike(_stall(""), "stall", copy),
        alike(_fenced(""), "fenced", copy),
        *(alike(row, "compute", copy) for row in _overhead("")),
        alike(_durable(""), "durable", write),
        *restores,
    ]


def load(results: Path = RESULTS) -> dict[str, Document]:
    kinds = ("cuda_*.json", "p*.json", "ranks_*.json", "trainers_*.json", "convert_*.json")
    paths = sorted(path for kind in kinds for path in results.glob(kind))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def page(documents: dict[str, Document]) -> str:
    """benchmarks/RESULTS.md."""
    shown, of_ranks = _shown(rows(), documents), _shown(rows_of_ranks(), documents)
    used = _used(shown, of_ranks)
    lines = [
        "# Measured",
        "",
        "Made by `python benchmarks/table.py` from the files in [`results`](results); do not edit it by hand.",
        "How each figure is measured, and how to measure it yourself: [`README.md`](README.md).",
        "",
        *_conditions(used),
        "",
        "## One process",
        "",
        *_table(shown, "results"),
    ]
    if of_ranks:
        lines += ["", "## Several ranks on one machine", "", "Each figure is the slowest rank's.", ""]
        lines += _table(of_ranks, "results")
    missed = _missed(used)
    if missed:
        lines += [
            "",
            "## Missed targets",
            "",
            f"{_share_missed(used)}. Each, with the 95 % interval of its figure:",
            "",
            *missed,
        ]
    return "\n".join(lines) + "\n"


def block(documents: dict[str, Document]) -> str:
    """What stands between the two marks in README.md."""
    shown = _shown([row for row in rows() if row.id in IN_README], documents)
    shown += _shown([row for row in rows_of_ranks() if row.id in IN_README_OF_RANKS], documents)
    everything = _used(_shown(rows(), documents), _shown(rows_of_ranks(), documents))
    lines = [*_conditions(_used(shown, [])), "", *_table(shown, "benchmarks/results"), ""]
    lines += [f"[All figures](benchmarks/RESULTS.md). {_share_missed(everything)}; that page lists each one."]
    return "\n".join(lines)


def _shown(some: Iterable[Row], documents: dict[str, Document]) -> list[tuple[Row, Document]]:
    return [(row, documents[row.id]) for row in some if row.shown(documents)]


def _used(*shown: Sequence[tuple[Row, Document]]) -> list[Document]:
    """The documents of the rows, each once."""
    return list({row.id: document for some in shown for row, document in some}.values())


def _share_missed(used: Sequence[Document]) -> str:
    targets = [target for document in used for target in document["targets"]]
    return f"{sum(not target['met'] for target in targets)} of {len(targets)} targets are missed"


def _missed(used: Sequence[Document]) -> list[str]:
    return [_miss(document, target) for document in used for target in document["targets"] if not target["met"]]


def _table(shown: Sequence[tuple[Row, Document]], results: str) -> list[str]:
    """`results`: the path of the results, from the page that the table is in."""
    head = ["| what | Tenuto | beside it | command |", "|---|---|---|---|"]
    return [*head, *(_line(row, document, results) for row, document in shown)]


def _conditions(documents: Iterable[Document]) -> list[str]:
    def place(one: Document) -> str:
        machine, device = one["machine"], f", {one['device']}" if "device" in one else ""
        return (
            f"{machine['cores']} cores ({machine['cpu']}){device}, {machine['file_system']}, "
            f"torch {one['versions']['torch']}"
        )

    places = sorted({place(one) for one in documents})
    return [
        f"On {'; and on '.join(places)}; medians of interleaved rounds. The file behind each figure names its",
        "command, versions and intervals.",
    ]


def _line(row: Row, document: Document, results: str) -> str:
    figures = document[row.figures]
    own = f"**{_figure(row, figures[row.own])}**"
    if row.reference is not None and row.reference[0] in figures:
        own += f" ({row.reference[1]}: {_figure(row, figures[row.reference[0]])})"
    beside = "; ".join(f"{words} {_figure(row, figures[name])}" for name, words in row.beside if name in figures)
    command = document["command"].removeprefix("python benchmarks/")
    what = row.what.format(gib=size(document))
    return f"| {what} | {own} | {beside} | [`{command}`]({results}/{document['id']}.json) |"


def size(document: Document) -> str:
    """Of the state, in GiB."""
    gib = document["state"]["gib"]
    return f"{gib:.0f}" if gib > 0.95 else f"{gib:.2f}".removesuffix("0")


def _figure(row: Row, value: float) -> str:
    if row.figures in ("share_lost", "stored_share"):
        return f"{value * 100:.1f} %"
    if row.figures == "median_bytes":
        return f"{value / MIB:,.0f} MiB"
    return seconds(value)


def seconds(value: float) -> str:
    """Three digits, in the unit that fits."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if abs(value) * factor < 999.5:
            scaled = value * factor
            return f"{scaled:.{2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0}f} {unit}"
    return f"{value:.2f} s"


def _miss(document: Document, target: dict[str, Any]) -> str:
    unit = next(name for name in UNITS if name in target)
    low, high = target["interval"]
    words = f" {UNITS[unit]}" if UNITS[unit] else ""
    where = f"[`{document['id']}`](results/{document['id']}.json)"
    if unit == "done":
        return f"- {where}: {target['target']}: not done"
    return f"- {where}: {target['target']}: {target[unit]:.2f}{words} ({low:.2f} to {high:.2f})"


def between(text: str) -> str:
    """The block of a README. ValueError if the marks are not there, once each and in order."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"README.md lacks the two lines\n  {BEGIN}\n  {END}")
    return text.split(BEGIN, 1)[1].split(END, 1)[0].strip("\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page differs")
    options = parser.parse_args()
    documents, text = load(), README.read_text(encoding="utf-8")
    found = {README: text.replace(between(text), block(documents)), PAGE: page(documents)}
    if options.check:
        differ = [path.name for path, made in found.items() if not path.exists() or path.read_text("utf-8") != made]
        sys.exit(f"{' and '.join(differ)} differ from the results: python benchmarks/table.py" if differ else 0)
    for path, made in found.items():
        path.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
