"""`tenuto show`: shows a checkpoint's content, origin and certificate, or one path of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import checkpoint, repository
from tenuto.errors import UsageError, typed

if TYPE_CHECKING:
    from tenuto.cli.views.shards import Contents
    from tenuto.model.leaf import LeafSpec
    from tenuto.model.records import Index, Manifest, Note
    from tenuto.repo.repository import Repo


EXAMPLES = examples(
    "tenuto show /data/checkpoints",
    "tenuto show /data/checkpoints --run gpt --step 500",
    "tenuto show /data/checkpoints --depth 1           # sums only",
    "tenuto show /data/checkpoints model/head.weight   # its first values, statistics, and parts",
    "tenuto show /data/checkpoints --timing            # how long saves held training, how fast they were written",
)
CERTIFICATE = ("exact", "reasons", "caveats", "at_other_ranks", "covers", "leaves_out", "code", "versions", "settings")
SHOWN_RANKS = 4
"""Ranks whose private values are printed."""
ITEM_BY_ITEM = ("reasons", "caveats", "at_other_ranks", "covers", "leaves_out")


def show(
    where: options.Where,
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="[PATH]", help="A leaf, a plain value, or what holds some: only that.", show_default=False
        ),
    ] = None,
    *,
    run: options.Run = None,
    step: options.Step = "latest",
    depth: Annotated[
        int | None, typer.Option("--depth", min=1, metavar="N", help="Sum up what lies deeper than N levels.")
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            "--rank", min=0, metavar="N", help="With PATH: whose #private values, of several ranks.", show_default=False
        ),
    ] = None,
    timing: Annotated[
        bool,
        typer.Option("--timing", help="Where the time of the run's saves went, oldest first; with --step of that one."),
    ] = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show what a checkpoint holds, and what a resume from it covers.

    With PATH: that leaf's element type, shape, first values and statistics, for which the whole leaf is read and
    verified, and which ranks have saved which parts of it; or that plain value; or the entries below it.
    """
    from tenuto.cli.views.run_listing import notes_of
    from tenuto.cli.views.shards import contents, print_ranks, spread
    from tenuto.cli.views.state_tree import columns, lines
    from tenuto.repo.lineage import latest

    repo = repository(where)
    id = checkpoint(repo, run, step)
    if timing:
        from tenuto.cli.views.save_timing import show_timing

        if path is not None or depth is not None:
            raise UsageError(
                "--timing speaks of whole saves: it goes with neither PATH nor --depth",
                hint=typed("tenuto", "show", where, "--timing"),
            )
        show_timing(repo, id.run, id if step != "latest" else None, json=json)
        return
    if rank is not None and path is None:
        raise UsageError("--rank goes with a PATH", hint=typed("tenuto", "show", where, "#private", "--rank", rank))
    if path is not None:
        from tenuto.cli.views.leaf_view import show_path

        show_path(repo, id, path, json=json, depth=depth, rank=rank)
        return
    manifest = repo.manifest(id)
    loaded = contents(repo, manifest)
    notes = notes_of(repo, id)
    is_latest = latest(repo, id.run) == id
    if json:
        output.document("show", _json(repo, manifest, loaded, notes, is_latest))
        return
    output.line(f"{id}{'  (latest)' if is_latest else ''}")
    output.line(output.rows(list(_about(repo, manifest, loaded, notes))))
    if manifest.certificate:
        output.line("\ncertificate")
        output.line(output.rows(_certificate(manifest)))
    if manifest.boxes is not None:
        print_ranks(loaded)
    output.line("\nstate")
    for text in columns(lines(manifest.tree, loaded.shared, depth=depth), spread(loaded.parts)):
        output.line(text)
    own = [index for index in loaded.indexes if index.private is not None]
    for index in own[:SHOWN_RANKS]:
        output.line(f"\nof rank {index.rank}")
        for text in columns(lines(index.private, loaded.private(index), depth=depth)):
            output.line(text)
    if len(own) > SHOWN_RANKS:
        output.line(f"\nof {len(own) - SHOWN_RANKS} more ranks: {typed('tenuto', 'show', where, '#private')} --rank N")


def _packs_by_place(repo: Repo, manifest: Manifest, loaded: Contents) -> dict[str, int] | None:
    """Returns the number of packs in each place, with packs not found under an empty name; None for a single place."""
    from tenuto.repo.replicated.places import copies_of, places_of

    if places_of(repo.store) is None:
        return None
    found: Counter[str] = Counter()
    for pack in (pack for index in loaded.indexes for pack in index.packs):
        urls = [store.url for store in copies_of(repo.store, f"{manifest.id.directory}/{pack.name}")]
        found.update(urls or [""])
    return dict(found)


def _about(repo: Repo, manifest: Manifest, loaded: Contents, notes: tuple[Note, ...]) -> Iterator[tuple[str, str]]:
    from tenuto.repo.notes import with_notes
    from tenuto.units import count, size

    packs = count(sum(len(index.packs) for index in loaded.indexes), "pack")
    if len(loaded.indexes) > 1:
        packs += f" of {len(loaded.indexes)} ranks"
    yield "lies in", f"{repo.url.rstrip('/')}/{manifest.id.directory}"
    of = sum(len(index.packs) for index in loaded.indexes)
    for url, many in (_packs_by_place(repo, manifest, loaded) or {}).items():
        yield "packs in", f"{url or 'no place that is found from here'}: {many} of {of}"
    yield "holds", f"{size(manifest.bytes)}, {count(manifest.leaves, 'leaf')} in {packs}"
    yield "saved", f"{manifest.created or 'at an unknown time'}, save id {manifest.save_id}"
    yield "content", manifest.content
    saved_by = {name: value for name, value in manifest.environment.items() if name != "timing"}
    if saved_by:
        yield "saved by", _joined(saved_by)
    yield "parent", str(manifest.parent) if manifest.parent else "none: begun from nothing"
    if manifest.progress:
        counts = {name: value for name, value in manifest.progress.items() if name not in ("data", "alike")}
        yield "progress", ", ".join(f"{name} {_short(value)}" for name, value in counts.items())
    cursor, alike = (manifest.progress.get(name) for name in ("data", "alike"))
    if isinstance(cursor, Mapping):
        yield "data", f"{cursor.get('used')} of {cursor.get('samples')} samples of epoch {cursor.get('epoch')} are used"
    if alike:
        yield "random", f"alike on all ranks: {_joined(alike)}"
    metrics = with_notes(manifest.metrics, notes)
    if metrics:
        yield "metrics", ", ".join(f"{name} {value:.6g}" for name, value in sorted(metrics.items()))
    for name, by in _unlogged(manifest, metrics).items():
        yield "not logged", f"{name}, which {by} goes by"
    kinds = [note.kind for note in notes if note.kind != "metric"]
    if kinds:
        yield "noted", ", ".join(kinds)


def _unlogged(manifest: Manifest, metrics: Mapping[str, float]) -> dict[str, str]:
    """Returns the metrics that the training's policies read and this checkpoint lacks, with those policies."""
    watches = manifest.certificate.get("watches")
    if not isinstance(watches, Mapping):
        return {}
    return {name: str(by) for name, by in watches.items() if name not in metrics}


def _certificate(manifest: Manifest) -> list[tuple[str, str]]:
    """Returns the certificate's rows, the most important first; a list of phrases takes one row each."""
    found = manifest.certificate
    others = [name for name in found if name not in (*CERTIFICATE, "watches", "modes")]
    names = [name for name in CERTIFICATE if name in found] + others
    rows: list[tuple[str, str]] = []
    for name in names:
        value = found[name]
        by_item = name in ITEM_BY_ITEM and isinstance(value, list)
        parts = [_short(one) for one in value] if by_item else [_joined(value)]
        rows += [(name.replace("_", " ") if number == 0 else "", part) for number, part in enumerate(parts)]
    return rows


def _joined(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_short(inner)}" for key, inner in value.items())
    return ", ".join(map(_short, value)) if isinstance(value, list) else _short(value)


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else "none" if value is None else str(output.jsonable(value))


def _json(repo: Repo, manifest: Manifest, loaded: Contents, notes: tuple[Note, ...], is_latest: bool) -> dict[str, Any]:
    from tenuto.cli.views.shards import parts_json
    from tenuto.cli.views.state_tree import lines, values
    from tenuto.repo.notes import with_notes

    metrics = with_notes(manifest.metrics, notes)
    several = manifest.boxes is not None
    return {
        "where": repo.url,
        "checkpoint": manifest.id,
        "latest": is_latest,
        "save_id": manifest.save_id,
        "created": manifest.created or None,
        "content": manifest.content,
        "bytes": manifest.bytes,
        "parent": manifest.parent,
        "progress": manifest.progress,
        "metrics": metrics,
        "unlogged": _unlogged(manifest, metrics),
        "notes": [{"kind": note.kind, **note.body} for note in notes],
        "environment": manifest.environment,
        "certificate": manifest.certificate,
        "packs_in": _packs_by_place(repo, manifest, loaded),
        "ranks": len(loaded.indexes),
        "packs": [
            {"name": pack.name, "bytes": pack.length, "rank": index.rank}
            for index in loaded.indexes
            for pack in index.packs
        ],
        "leaves": [
            *(
                _leaf_json(spec) | ({"parts": parts_json(loaded.parts.get(spec.path, []))} if several else {})
                for spec in loaded.shared
            ),
            *(
                _leaf_json(spec) | ({"rank": index.rank} if several else {})
                for index in loaded.indexes
                for spec in loaded.private(index)
            ),
        ],
        "values": values(lines(manifest.tree, loaded.shared)),
        **({"private_values": [_private_values(loaded, index) for index in loaded.indexes]} if several else {}),
    }


def _leaf_json(spec: LeafSpec) -> dict[str, Any]:
    return {
        "path": spec.path,
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "bytes": spec.nbytes,
        "private": spec.private,
    }


def _private_values(loaded: Contents, index: Index) -> Mapping[str, Any]:
    """Returns the plain values of one rank by path."""
    from tenuto.cli.views.state_tree import lines, values

    return {} if index.private is None else values(lines(index.private, loaded.private(index)))
