"""The README's table of measured figures, made from the committed results and nothing else.

    python benchmarks/table.py            # writes it between the two marks in README.md
    python benchmarks/table.py --check    # fails where README.md says something else

A row whose result is not there is left out. What is missed is listed below the table, so that no miss gets lost.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
README = HERE.parent / "README.md"
BEGIN = "<!-- measured: made by benchmarks/table.py from benchmarks/results; edit neither by hand -->"
END = "<!-- end of what is measured -->"
MIB = 1 << 20
UNITS = {"ratio": "", "ms": "ms", "us": "us", "mib": "MiB", "done": ""}
"""What a target's figure may be, by its key in a result."""

Document = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """`own`: Holdfast's figure in the result, and what is said beside it; `beside`: others' figures and their words.

    `{gib}` in `what` is the state's size. `figures`: "median_s" or "median_bytes".
    """

    id: str
    what: str
    own: str
    beside: Sequence[tuple[str, str]]
    reference: tuple[str, str] | None = None
    figures: str = "median_s"


def rows() -> list[Row]:
    found: list[Row] = []
    for gib in ("1gib", "4gib"):
        found.append(
            Row(
                f"p1_stall_{gib}",
                "training held by an asynchronous save, {gib} GiB",
                "holdfast save()",
                (
                    ("dcp.async_save, thread", "`dcp.async_save` (thread)"),
                    ("dcp.async_save, process", "(process)"),
                    ("torch.save", "`torch.save`"),
                ),
                ("memcpy", "one copy in memory"),
            )
        )
    found.append(
        Row(
            "p3_overhead",
            "training time lost to a save, all cores busy, {gib} GiB",
            "lost to a holdfast save()",
            (
                ("lost to a dcp.async_save, thread", "`dcp.async_save` (thread)"),
                ("lost to a dcp.async_save, process", "(process)"),
            ),
            ("memcpy", "one copy in memory"),
        )
    )
    for gib in ("1gib", "4gib"):
        found.append(
            Row(
                f"p4_sync_save_{gib}",
                "durable save, flushed and digested, {gib} GiB",
                "holdfast save(wait=True)",
                (
                    ("holdfast.save, one-off", "one-off `holdfast.save`"),
                    ("torch.save + fsync", "`torch.save` + fsync"),
                    ("dcp.save", "`dcp.save`"),
                    ("safetensors + fsync", "safetensors + fsync"),
                    ("torch_checkpointing + fsync", "torch_checkpointing + fsync"),
                ),
                ("raw O_DIRECT write", "raw direct write"),
            )
        )
    for heat, words, reference in (
        ("hot", "from the page cache", ("memcpy", "one copy in memory")),
        ("cold", "from a cold disk", ("raw O_DIRECT read", "raw direct read")),
    ):
        for gib in ("1gib", "4gib"):
            found.append(
                Row(
                    f"p5_restore_{heat}_{gib}",
                    f"restore {words}, every byte verified, {{gib}} GiB",
                    "holdfast.load",
                    (
                        ("dcp.load", "`dcp.load`"),
                        ("torch.load + copy", "`torch.load`"),
                        ("torch.load(mmap) + copy", "`torch.load(mmap=True)`"),
                        ("safetensors + copy", "safetensors"),
                    ),
                    reference,
                )
            )
    return [*found, *_small(), *_lazy(), *_memory()]


def _small() -> list[Row]:
    saves = ("torch.save + fsync", "dcp.save", "safetensors + fsync")
    loads = ("torch.load + copy", "dcp.load", "safetensors + copy")
    words = {name: name if name.startswith("safetensors") else f"`{name.split(' +')[0]}`" for name in (*saves, *loads)}
    return [
        Row(
            "p7_small",
            "durable save of 10,000 tensors of 1 KiB",
            "holdfast save(wait=True)",
            tuple((name, words[name]) for name in saves),
            ("holdfast.save, one-off", "one-off"),
        ),
        Row(
            "p7_small",
            "restore of 10,000 tensors of 1 KiB",
            "holdfast.load",
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
            found.append(Row("p6_lazy", f"{what}, {words}", f"holdfast: {own}, {heat}", beside))
    return found


_NAMES = {"torch.load(mmap)": "`torch.load(mmap=True)`", "safetensors": "safetensors", "dcp": "`dcp.load`"}


def _memory() -> list[Row]:
    saves = ("dcp.async_save, thread", "dcp.async_save, process")
    loads = ("torch.load + copy", "dcp.load", "safetensors + copy")
    return [
        Row(
            "p8_memory",
            "memory of an asynchronous save above the training's own, {gib} GiB",
            "holdfast.Checkpointer: held",
            (
                *((f"{one}: held", f"`{one.replace(', ', '` (')})") for one in saves),
                *((f"{one}: with page cache", "with its page cache") for one in saves[:1]),
            ),
            ("holdfast.save, one-off: held", "one-off `holdfast.save`"),
            "median_bytes",
        ),
        Row(
            "p8_memory",
            "memory of a restore above its destination, {gib} GiB",
            "holdfast.load: held",
            tuple((f"{one}: held", f"`{one.removesuffix(' + copy')}`") for one in loads),
            None,
            "median_bytes",
        ),
    ]


def load(results: Path = RESULTS) -> dict[str, Document]:
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("p*.json"))}


def block(documents: dict[str, Document]) -> str:
    """What stands between the two marks."""
    shown = [(row, documents[row.id]) for row in rows() if row.id in documents]
    used = {row.id: document for row, document in shown}
    lines = [
        *_conditions(used.values()),
        "",
        "| what | Holdfast | beside it | command |",
        "|---|---|---|---|",
        *(_line(row, document) for row, document in shown),
    ]
    missed = [
        _miss(document, target) for document in used.values() for target in document["targets"] if not target["met"]
    ]
    if missed:
        lines += ["", "What falls short of what we want, with the 95 % interval of each figure:", "", *missed]
    return "\n".join(lines)


def _conditions(documents: Iterable[Document]) -> list[str]:
    places = sorted(
        {
            f"{one['machine']['cores']} cores ({one['machine']['cpu']}), {one['machine']['file_system']}, "
            f"torch {one['versions']['torch']}"
            for one in documents
        }
    )
    return [
        f"On {'; and on '.join(places)}; medians of interleaved rounds. Every figure is in a file of",
        "[`benchmarks/results`](benchmarks/results) that names its command, versions and intervals.",
    ]


def _line(row: Row, document: Document) -> str:
    figures = document[row.figures]
    own = f"**{_figure(row, figures[row.own])}**"
    if row.reference is not None and row.reference[0] in figures:
        own += f" ({row.reference[1]}: {_figure(row, figures[row.reference[0]])})"
    beside = "; ".join(f"{words} {_figure(row, figures[name])}" for name, words in row.beside if name in figures)
    command = document["command"].removeprefix("python benchmarks/")
    what = row.what.format(gib=f"{document['state']['gib']:.0f}")
    return f"| {what} | {own} | {beside} | [`{command}`](benchmarks/results/{document['id']}.json) |"


def _figure(row: Row, value: float) -> str:
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
    where = f"[`{document['id']}`](benchmarks/results/{document['id']}.json)"
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
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the README differs")
    options = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    made = block(load())
    if options.check:
        sys.exit(0 if between(text) == made else "README.md differs from the results: python benchmarks/table.py")
    README.write_text(text.replace(between(text), made), encoding="utf-8")


if __name__ == "__main__":
    main()
