"""`tenuto show`: shows a page about a checkpoint, all of its content, its certificate, or one path of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
    "tenuto show /data/checkpoints --run gpt --step 500",
    "tenuto show /data/checkpoints model/head.weight   # its values",
    "tenuto show /data/checkpoints --leaves --depth 2  # sums below two levels",
    "tenuto show /data/checkpoints --timing            # what saves have cost",
    "tenuto show /data/checkpoints --why               # why it was saved then",
)
CERTIFICATE = (
    *("verdict", "proof", "reasons", "unknown", "caveats", "at_other_ranks", "covers", "leaves_out"),
    *("code", "versions", "settings", "keep"),
)
NOT_SHOWN = frozenset({"exact", "uncounted", "watches", "modes"})
"""What the certificate says again for machines, or another row says."""
SHOWN_RANKS = 4
"""Ranks whose private values are printed."""
ITEM_BY_ITEM = ("reasons", "unknown", "caveats", "at_other_ranks", "covers", "leaves_out")


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
    leaves: Annotated[bool, typer.Option("--leaves", help="Every tensor and value of the state.")] = False,
    depth: Annotated[
        int | None, typer.Option("--depth", min=1, metavar="N", help="The same, summed up below N levels.")
    ] = None,
    certificate: Annotated[
        bool, typer.Option("--certificate", help="What a resume covers and what not; what has saved it.")
    ] = False,
    private: Annotated[bool, typer.Option("--private", help="What each rank has saved, and has of its own.")] = False,
    rank: Annotated[
        int | None,
        typer.Option("--rank", min=0, metavar="N", help="With PATH: whose #private values.", show_default=False),
    ] = None,
    timing: Annotated[
        bool, typer.Option("--timing", help="Where the time of the run's saves, or of this STEP, went.")
    ] = False,
    why: Annotated[bool, typer.Option("--why", help="Why it was saved then: the policy's own reason.")] = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show what a checkpoint holds and what a resume covers.

    A page: whether a resume is exact, the step, metrics, sizes, and what is unusual.

    With PATH: that leaf's element type, shape, first values and statistics, for which the whole leaf is read and
    verified, and which ranks have saved which parts of it; or that plain value; or the entries below it.
    """
    from tenuto.cli.views.run_listing import notes_of
    from tenuto.cli.views.shards import contents

    sections = leaves or certificate or private or depth is not None
    _check(where, path, rank, timing, sections=sections, depth=depth)
    if why and (timing or path is not None or sections):
        raise UsageError("--why stands alone", subject="--why", hint=typed("tenuto", "show", where, "--why"))
    repo = repository(where)
    id = checkpoint(repo, run, step)
    if timing:
        from tenuto.cli.views.save_timing import show_timing

        show_timing(repo, id.run, id if step != "latest" else None, json=json)
        return
    if path is not None:
        from tenuto.cli.views.leaf_view import show_path

        show_path(repo, id, path, json=json, depth=depth, rank=rank)
        return
    manifest = repo.manifest(id)
    if why:
        _why(manifest, json)
        return
    loaded = contents(repo, manifest)
    notes = notes_of(repo, id)
    if json:
        output.document("show", _json(repo, manifest, loaded, notes))
        return
    if not (leaves or certificate or private or depth is not None):
        _page(repo, where, manifest, loaded, notes)
        return
    output.line(str(id))
    if certificate:
        output.line(output.rows([*_certificate(manifest), *_origin(manifest)]))
    if leaves or depth is not None:
        _leaves(manifest, loaded, depth)
    if private:
        _private(where, manifest, loaded)


def _check(where: str, path: str | None, rank: int | None, timing: bool, *, sections: bool, depth: int | None) -> None:
    """Raises UsageError for options that do not go together."""
    if timing and (path is not None or sections):
        raise UsageError(
            "--timing is about whole saves: it cannot be combined with PATH, --leaves, --certificate or --private",
            hint=typed("tenuto", "show", where, "--timing"),
        )
    if path is not None and sections and depth is None:
        raise UsageError(
            "--leaves, --certificate and --private are about the whole checkpoint, not a PATH",
            subject=path,
            hint=typed("tenuto", "show", where, path),
        )
    if rank is not None and path is None:
        raise UsageError("--rank goes with a PATH", hint=typed("tenuto", "show", where, "#private", "--rank", rank))


def _why(manifest: Manifest, json: bool) -> None:
    """Says why the checkpoint was saved when it was, a line for each part of the reason."""
    reason = str(manifest.environment.get("why") or "")
    parts = [part for part in reason.split("; ") if part]
    if json:
        output.document("show", {"checkpoint": manifest.id, "why": reason or None, "parts": parts})
        return
    rows = [("why then" if number == 0 else "", part) for number, part in enumerate(parts)]
    output.line(str(manifest.id))
    output.line(output.rows(rows or [("why then", "unknown: no policy asked for it")]))


def _page(repo: Repo, where: str, manifest: Manifest, loaded: Contents, notes: tuple[Note, ...]) -> None:
    from tenuto.cli.views.checkpoint_page import Page, verdict_of
    from tenuto.repo.notes import texts_of, with_notes

    metrics = with_notes(manifest.metrics, notes)
    place = f"{repo.url.rstrip('/')}/{manifest.id.directory}"
    texts = [("note" if number == 0 else "", text) for number, text in enumerate(texts_of(notes))]
    unusual = [*_damage(notes), *_restorable(notes), *texts, *_unusual(repo, manifest, loaded, metrics)]
    marks = _marks(repo, manifest, notes)
    page = Page(manifest, loaded, place, marks, *verdict_of(manifest.certificate), metrics, unusual)
    for text in page.lines():
        output.line(text, cleaned=True)
    output.story(f"more: {typed('tenuto', 'show', where, '--run', manifest.id.run)} --leaves --certificate --private")


def _sealed(repo: Repo, manifest: Manifest) -> str:
    """Returns whether it is sealed, where the repository has keys. What is refused has raised before."""
    keyed = repo.keys is not None or repo.closed_ring is not None
    return ("sealed" if manifest.code else "plain") if keyed else ""


def _marks(repo: Repo, manifest: Manifest, notes: Sequence[Note]) -> list[str]:
    """Returns the marks that `tenuto ls` gives it, but for what takes a look at the others."""
    from tenuto.cli.views.run_listing import RunRow, pins_among, refs_of, tags_among
    from tenuto.repo.lineage import latest, stretches

    id = manifest.id
    on_walk = any(stretch.covers(id) for stretch in stretches(repo, id.run, known={id}))
    refs = refs_of(repo).get(id, ())
    tags, pins = tags_among(refs), pins_among(refs)
    row = RunRow(
        id,
        "committed",
        latest(repo, id.run) == id,
        on_walk,
        notes=tuple(notes),
        tags=tags,
        pins=pins,
        health=manifest.health,
        sealed=_sealed(repo, manifest),
    )
    return row.marks()


def _leaves(manifest: Manifest, loaded: Contents, depth: int | None) -> None:
    from tenuto.cli.views.shards import spread
    from tenuto.cli.views.state_tree import columns, lines

    for text in columns(lines(manifest.tree, loaded.shared, depth=depth), spread(loaded.parts)):
        output.line(text)


def _private(where: str, manifest: Manifest, loaded: Contents) -> None:
    from tenuto.cli.views.shards import print_ranks
    from tenuto.cli.views.state_tree import columns, lines

    if manifest.boxes is not None:
        print_ranks(loaded)
    own = [index for index in loaded.indexes if index.private is not None]
    for index in own[:SHOWN_RANKS]:
        output.line(f"\nof rank {index.rank}")
        for text in columns(lines(index.private, loaded.private(index))):
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
        urls = [store.url for store in copies_of(repo.store, f"{(pack.at or manifest.id).directory}/{pack.name}")]
        found.update(urls or [""])
    return dict(found)


def _damage(notes: Sequence[Note]) -> Iterator[tuple[str, str]]:
    """Yields what is known of damage, and when the checkpoint was last found whole."""
    from tenuto.cli.views.ages import since
    from tenuto.repo.notes import UNREADABLE, last_of, verification_of
    from tenuto.units import size

    if verification_of(notes) == "suspect":
        yield "damage", "`tenuto verify` found some; a resume passes over this checkpoint while its bytes are wrong"
        lost = (last := last_of(notes, "suspect")) and last.body.get("leaves")
        if isinstance(lost, list) and lost:
            yield "damaged", ", ".join(map(str, lost))
    unreadable = last_of(notes, UNREADABLE)
    if unreadable is not None:
        yield "damage", f"note {unreadable.number} cannot be read: what decides by notes passes over this checkpoint"
    verified = last_of(notes, "verified")
    if verified is not None:
        nbytes = verified.body.get("bytes")
        much = f", {size(nbytes)} read" if isinstance(nbytes, int) else ""
        yield "verified", f"{since(verified.created)}{much}"


def _restorable(notes: Sequence[Note]) -> Iterator[tuple[str, str]]:
    """Yields what the last drill has shown."""
    from tenuto.cli.views.run_listing import restorable
    from tenuto.units import count, seconds

    if not (words := restorable(notes)):
        return
    body = next(note.body for note in reversed(notes) if note.kind == "proven")
    if isinstance(took := body.get("seconds"), int | float):
        words += f", in {seconds(took)} on {body.get('host')} from {body.get('place')}"
    if isinstance(steps := body.get("steps"), int) and steps:
        words += f", {count(steps, 'later step')} repeated"
    yield "restorable", words.removeprefix("restorable: ")


def _unusual(
    repo: Repo, manifest: Manifest, loaded: Contents, metrics: Mapping[str, float]
) -> Iterator[tuple[str, str]]:
    """Yields rows for what most checkpoints have not."""
    of = sum(len(index.packs) for index in loaded.indexes)
    for url, many in (_packs_by_place(repo, manifest, loaded) or {}).items():
        yield "data files in", f"{url or 'no location that can be reached from here'}: {many} of {of}"
    if manifest.health is not None and not manifest.health.healthy:
        yield "unhealthy", str(manifest.health)
    for name, by in _unlogged(manifest, metrics).items():
        yield "not logged", f"{name}, which {by} uses"


def _origin(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yields what saved the checkpoint, and what identifies it."""
    saved_by = {
        name: value for name, value in manifest.environment.items() if name not in ("timing", "encoding", "why")
    }
    if why := manifest.environment.get("why"):
        yield "why then", str(why)
    if saved_by:
        yield "saved by", _joined(saved_by)
    cursor, alike = (manifest.progress.get(name) for name in ("data", "alike"))
    if isinstance(cursor, Mapping):
        yield "data", f"{cursor.get('used')} of {cursor.get('samples')} samples of epoch {cursor.get('epoch')} are used"
    if alike:
        yield "random", f"alike on all ranks: {_joined(alike)}"
    yield "save id", manifest.save_id
    yield "content", manifest.content


def _unlogged(manifest: Manifest, metrics: Mapping[str, float]) -> dict[str, str]:
    """Returns the metrics that the training's policies read and this checkpoint lacks, with those policies."""
    watches = manifest.certificate.get("watches")
    if not isinstance(watches, Mapping):
        return {}
    return {name: str(by) for name, by in watches.items() if name not in metrics}


def _certificate(manifest: Manifest) -> list[tuple[str, str]]:
    """Returns the certificate's rows, the most important first; a list of phrases takes one row each."""
    found = manifest.certificate
    others = [name for name in found if name not in CERTIFICATE and name not in NOT_SHOWN]
    names = [name for name in CERTIFICATE if found.get(name) not in (None, [])] + others
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


def _json(repo: Repo, manifest: Manifest, loaded: Contents, notes: tuple[Note, ...]) -> dict[str, Any]:
    from tenuto.cli.views.ages import age_s
    from tenuto.cli.views.run_listing import notes_json, pins_among, pins_json, refs_of, tags_among
    from tenuto.cli.views.shards import parts_json
    from tenuto.cli.views.state_tree import lines, values
    from tenuto.repo.lineage import latest
    from tenuto.repo.notes import with_notes

    metrics = with_notes(manifest.metrics, notes)
    refs = refs_of(repo).get(manifest.id, ())
    seconds = age_s(manifest.created)
    several = manifest.boxes is not None
    return {
        "where": repo.url,
        "checkpoint": manifest.id,
        "latest": latest(repo, manifest.id.run) == manifest.id,
        "tags": list(tags_among(refs)),
        "pins": pins_json(pins_among(refs)),
        "save_id": manifest.save_id,
        "sealed": _sealed(repo, manifest) or None,
        "created": manifest.created or None,
        "age_s": None if seconds is None else round(seconds, 3),
        "content": manifest.content,
        "bytes": manifest.bytes,
        "stored": manifest.environment.get("encoding"),
        "parent": manifest.parent,
        "progress": manifest.progress,
        "metrics": metrics,
        "unlogged": _unlogged(manifest, metrics),
        "notes": notes_json(notes),
        "health": None if manifest.health is None else manifest.health.to_json(),
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
