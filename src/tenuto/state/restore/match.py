"""Matches a checkpoint with a target: plans the restore, reports all mismatches at once, and changes nothing yet."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn

import numpy as np

from tenuto.concurrency.worker_threads import gc_paused
from tenuto.errors import CorruptionError, StateError, StateMismatch, did_you_mean
from tenuto.events import warn
from tenuto.model.leaf import LeafSpec, join, lineage
from tenuto.model.records import Json
from tenuto.record import record
from tenuto.state import frameworks
from tenuto.state.contract import LoadReport, Prepared, Rename, Rows
from tenuto.state.frameworks import is_stateful, type_name
from tenuto.state.restore.entries import mapping_entries
from tenuto.state.restore.restorer import Restorer, Thunk
from tenuto.state.restore.selection import Patterns, Renaming, Selection
from tenuto.state.tree import BETWEEN, KEYED, OWN, PRIVATE, children, items, kind_of, leaf_paths, name_of, terminals
from tenuto.state.update_barrier import let_updates_pass

SHOWN = 10
"""The number of mismatches an error lists."""


@gc_paused
def match_state(
    tree: Json,
    private_tree: Json,
    specs: Sequence[LeafSpec],
    into: Any = None,
    *,
    within: Any = None,
    private_into: Any = None,
    strict: bool = True,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    rename: Rename | None = None,
    device: Any = None,
    apart: bool = False,
) -> Prepared:
    """Matches a checkpoint with `into`, or plans new values where `into` is None.

    - `specs`: the leaves of `tree` in full shape, then those of `private_tree`.
    - `private_tree`: of the rank whose own values to restore, or None. Values marked `per_rank` return to their marks,
      or stay unchanged without a private tree; the rest goes only into `private_into`, a mapping.
    - `rename`: maps paths of the checkpoint to the target's: a mapping of prefixes, or a function.
    - `include`, `exclude`: globs or compiled expressions over the target's paths.
    - `within`: the state that `into` is some entries of, where parameters of optimizers are looked up.
    - `into`: a module, optimizer or other object takes the one entry of the checkpoint that fits it.
    - `device`: for new tensors and meta targets (default: host memory).
    - `apart`: other ranks have targets of their own; what this one does not take is in `unmatched`, no mismatch.

    Raises StateMismatch that lists the differences (with `strict`), StateError for targets that cannot be filled at
    all, CorruptionError for a tree that `flatten` cannot have made. The target is unchanged until a sink is filled;
    what code of others refuses later is put back (`Kept`).
    """
    let_updates_pass()  # a save may still be copying what is filled
    shared, private = _checked_paths(tree, private_tree, specs)
    matched = Renaming(rename).apply(tree) if rename is not None else tree
    entry = _entry_for(matched, into, specs, len(shared), apart=apart)
    if entry is not None:
        into = {entry: into}
    target = into if within is None else within
    restorer = Restorer(specs, target, Selection(include, exclude), device, strict, apart=apart)
    rest, own_nodes = _own_values(private_tree)
    restorer.begin_own(private_tree, len(shared), len(private), own_nodes)
    restorer.begin(matched, 0, len(shared))
    root = _root(restorer, matched, into)
    own: Thunk | None = None
    if _is_of_files(rest):
        pass  # no rank has saved anything for itself
    elif private_into is not None and private_tree is not None:
        restorer.begin(private_tree, len(shared), len(private))
        own = _root(restorer, rest, private_into, PRIVATE)
        restorer.skipped.extend(join(_OWN_ROOT, path) for path in restorer.own_left())
    else:
        taken = {join(_OWN_ROOT, path) for path in own_nodes.keys() - set(restorer.own_left())}
        restorer.skipped.extend(path for path in private if taken.isdisjoint(lineage(path)))
    _check(restorer, apart=apart)
    if strict and not restorer.selection.everything:
        _check_selection(restorer, matched, include)

    restorer.keep_filled()

    def apply() -> Any:
        try:
            restorer.act()
            state = root()
            if own is not None:
                own()
        except BaseException as error:
            restorer.kept.put_back(error)
            raise
        restorer.kept.end()
        if restorer.plainer:
            warn(
                f"{_few(restorer.plainer)}: loaded as plain tensors, since the program has not loaded their classes; "
                "import those before the load"
            )
        prepared.report = _report(restorer)
        return state if entry is None else state[entry]

    wants, boxes = restorer.wants()
    left = _unmatched(restorer, matched) if apart and strict else None
    prepared = Prepared(wants, apply, _report(restorer), boxes, left)
    return prepared


def _is_of_files(rest: Json) -> bool:
    """Returns whether a private tree has only what lies between the tensors of adopted files."""
    return isinstance(rest, dict) and kind_of(rest) == "dict" and [key for key, _ in items(rest)] == [BETWEEN]


def _own_values(private_tree: Json) -> tuple[Json, dict[str, Json]]:
    """Splits a private tree into the part with paths of its own and the nodes that belong at paths of the shared
    tree."""
    rest: Json = private_tree["v"] if private_tree is not None else None
    if not isinstance(rest, dict) or kind_of(rest) != "dict":
        return rest, {}
    pairs = items(rest)
    found = [child for key, child in pairs if key == OWN]
    if not found:
        return rest, {}
    if kind_of(found[0]) != "bypath":
        raise CorruptionError("the values of one rank are malformed", subject=_OWN_ROOT)
    nodes = {name_of(path): node for path, node in items(found[0])}
    return {**rest, "i": [[key, child] for key, child in pairs if key != OWN]}, nodes


_OWN_ROOT = join(PRIVATE, OWN)


def _checked_paths(tree: Json, private_tree: Json, specs: Sequence[LeafSpec]) -> tuple[list[str], list[str]]:
    if private_tree is not None and kind_of(private_tree) != "private":
        raise CorruptionError("the private tree is not a tree")
    if isinstance(specs, Rows) and specs.trees[0] is tree and specs.trees[1] is private_tree:
        return list(specs.paths[: specs.shared]), list(specs.paths[specs.shared :])
    shared, private = leaf_paths(tree), leaf_paths(private_tree) if private_tree is not None else []
    if shared + private != [spec.path for spec in specs]:
        raise CorruptionError(
            "the index does not list the leaves that the tree names",
            hint="`tenuto verify WHERE` names all that is damaged",
        )
    return shared, private


def _root(restorer: Restorer, tree: Json, into: Any, path: str = "") -> Thunk:
    if into is None:
        before = len(restorer.created)
        built = restorer.rebuild(tree, path) if restorer.selection.everything else _selected(restorer, tree)
        restorer.restored.extend(restorer.created[before:])
        del restorer.created[before:]
        return built
    is_object = frameworks.adapter_for(type(into)) is not None or is_stateful(into)
    keyed = kind_of(tree) in KEYED
    if isinstance(into, Mapping) and not is_object:
        if not keyed and kind_of(tree) != "module":
            raise StateMismatch(
                f"the checkpoint is {restorer.words(tree)}; the target is a mapping",
                hint="into=…, without a mapping around it",
            )
        if not keyed and not any(isinstance(key, str) and key in into for key, _ in items(tree)):
            raise StateMismatch(
                "the checkpoint is one module's entries; the target is a mapping with none of them", hint="into=model"
            )
        return mapping_entries(restorer, tree, into, path, root=keyed)
    return restorer.value(tree, into, path)


def _entry_for(tree: Json, into: Any, specs: Sequence[LeafSpec], count: int, *, apart: bool) -> str | None:
    """Returns the entry of the checkpoint that the one object `into` takes; None where `into` is no object, or the
    checkpoint has no entries.

    It is the one that fits without a difference; where none does, the one of which anything fits, so that the
    differences are named. Raises StateMismatch where there are several, or none at all.
    """
    is_object = into is not None and (frameworks.adapter_for(type(into)) is not None or is_stateful(into))
    if not is_object or kind_of(tree) not in KEYED:
        return None
    names = [key for key, _ in items(tree) if isinstance(key, str)]
    fitting: list[str] = []
    alike: list[str] = []
    refused: list[StateError] = []
    for (name, child), (path, _) in zip(items(tree), children(tree, ""), strict=True):
        if not isinstance(name, str):
            continue
        trial = Restorer(specs, {name: into}, Selection(), None, True, apart=apart)
        trial.begin(tree, 0, count)
        try:
            trial.value(child, into, path)
        except StateError as error:
            refused.append(error)
            continue
        left_over = trial.unexpected and not apart
        differs = trial.mismatched or trial.missing or trial.faults or trial.notes or left_over
        if not differs:
            fitting.append(name)
        elif trial.restored or any(_subject(problem) != path for problem in trial.mismatched):
            alike.append(name)
    found = fitting or alike
    if len(found) == 1:
        return found[0]
    if not found and len(refused) == 1:
        raise refused[0]
    kind = type_name(type(into))
    which = f"{len(fitting)} of them fit it: {_few(fitting)}" if fitting else "none of them fits it"
    raise StateMismatch(
        f"the checkpoint has the entries {_few(names)}; the target is one {kind}, and {which}",
        subject=kind,
        hint=f'into={{"{(found or names or ["model"])[0]}": …}} names the entry',
    )


def _few(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _selected(restorer: Restorer, tree: Json) -> Thunk:
    """Plans a new state of what include and exclude leave of the tree."""
    remaining = _prune(restorer, tree, "")
    return restorer.rebuild(remaining if remaining is not _NOTHING else {"!": "dict", "i": []}, "")


def _prune(restorer: Restorer, node: Json, path: str) -> Json:
    kind = kind_of(node)
    if kind in ("dict", "ordereddict", "module"):
        pairs = zip(items(node), children(node, path), strict=True)
        remaining = [
            [key, pruned]
            for (key, child), (where, _) in pairs
            if (pruned := _prune(restorer, child, where)) is not _NOTHING
        ]
        return {**node, "i": remaining} if remaining else _NOTHING
    if any(restorer.selection.takes(where) for where in terminals(node, path)):
        return node
    restorer.skipped.append(path)
    return _NOTHING


_NOTHING: Json = object()


def _unmatched(restorer: Restorer, tree: Json) -> Unmatched | None:
    # Of the skipped paths, only entries that the target does not name. Those below are a rank's own, or excluded by the
    # selection, which is passed separately.
    aside, selection = [path for path in restorer.skipped if "/" not in path], restorer.selection
    if selection.everything and not restorer.unexpected and not aside:
        return None
    return unmatched(tree, restorer.unexpected, aside, selection.takes)


def _check(restorer: Restorer, *, apart: bool) -> None:
    if restorer.faults:
        raise StateError(_listed(restorer.faults, "cannot be restored"), subject=_subject(restorer.faults[0]))
    problems = [
        *restorer.mismatched,
        *_not_there(restorer.missing),
        *_only_there(() if apart else restorer.unexpected),
    ]
    if restorer.strict and problems:
        raise _mismatch(problems, [*restorer.unexpected, *restorer.skipped])


def refuse_unmatched(paths: Sequence[str], missing: Sequence[str] = ()) -> None:
    """Raises StateMismatch for paths that no target takes, or that a target found missing, if there are any."""
    if paths or missing:
        raise _mismatch([*_not_there(missing), *_only_there(paths)])


def refuse_differing(problems: Sequence[str]) -> NoReturn:
    """Raises StateMismatch for what differs, found while the target took it."""
    raise _mismatch(problems)


def _not_there(paths: Iterable[str]) -> list[str]:
    return [f"{path}: {_ABSENT}" for path in paths]


_ABSENT: Final = "not in the checkpoint"


def _only_there(paths: Iterable[str]) -> list[str]:
    return [f"{path}: in the checkpoint only" for path in paths]


_ADVICE: Final = (
    "strict=False restores what fits: ckpt.restore(strict=False), or tenuto.load(…, strict=False); "
    "load's rename=, include= and exclude= say what belongs where"
)


def _mismatch(problems: Sequence[str], there: Sequence[str] = ()) -> StateMismatch:
    return StateMismatch(
        _listed(problems, "the checkpoint and the target differ"),
        subject=_subject(problems[0]),
        hint=_nearest_hint(problems, there) or _ADVICE,
    )


def _nearest_hint(problems: Sequence[str], there: Sequence[str]) -> str | None:
    """Returns what a path that the checkpoint lacks may have been meant to be, of what only the checkpoint has."""
    first = _subject(problems[0])
    near = did_you_mean(first, there) if problems[0] == f"{first}: {_ABSENT}" else None
    return None if near is None else f"{near} {_ADVICE}"


def _check_selection(restorer: Restorer, tree: Json, include: Patterns | None) -> None:
    """Raises StateMismatch for a selection that matches nothing, which is certainly a mistake."""
    paths = terminals(tree, "")
    if paths and not any(map(restorer.selection.takes, paths)):
        patterns = [include] if isinstance(include, str | re.Pattern) else include or ()
        globs = [one for one in patterns if isinstance(one, str)]
        there = [*dict.fromkeys(path.partition("/")[0] for path in paths), *paths]
        near = (did_you_mean(glob.removesuffix("*").removesuffix("/"), there) for glob in globs)
        raise StateMismatch(
            "include= and exclude= leave nothing of the checkpoint",
            subject=paths[0],
            hint=next(filter(None, near), None)
            or f"they are globs over paths such as {paths[0]!r}; strict=False restores nothing without a word",
        )


def _subject(problem: str) -> str:
    return re.split(r": ", problem, maxsplit=1)[0]


def _listed(problems: Sequence[str], title: str) -> str:
    shown = "".join(f"\n  {problem}" for problem in problems[:SHOWN])
    more = f"\n  … and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return f"{title} ({len(problems)}):{shown}{more}"


def _report(restorer: Restorer) -> LoadReport:
    return LoadReport(
        restored=tuple(restorer.restored),
        created=tuple(restorer.created),
        missing=tuple(restorer.missing),
        unexpected=tuple(restorer.unexpected),
        skipped=tuple(restorer.skipped),
        mismatched=tuple(restorer.mismatched),
        notes=tuple(restorer.notes),
        replaced=tuple(restorer.replaced),
    )


# --------------------------------------------------------------------------------------------------
# The parts of a checkpoint that one of several ranks does not take, encoded for comparison with the other ranks: a
# stage that leaves over what others take is no mismatch.

_MARK_BYTES: Final = 8


@record
class Unmatched:
    """The unmatched paths of one rank.

    - `paths`: the terminals of the checkpoint's tree, as the target names them. The others have one packed bit per
      path:
    - `over`: in an entry that the target names, without a place in it.
    - `untaken`: the same, and what the rank does not ask for.
    """

    paths: Sequence[str]
    over: bytes
    untaken: bytes

    def encode(self) -> bytes:
        spelled = "\0".join(self.paths).encode("utf-8", "backslashreplace")
        return hashlib.sha256(spelled).digest()[:_MARK_BYTES] + zlib.compress(self.over + self.untaken)

    def named(self, packed: bytes) -> list[str]:
        """Returns the paths whose bits are set."""
        return [self.paths[at] for at in np.flatnonzero(np.unpackbits(np.frombuffer(packed, np.uint8))).tolist()]


def unmatched(
    tree: Json, over: Collection[str], aside: Collection[str], takes: Callable[[str], bool]
) -> Unmatched | None:
    """Compares a tree with the target: paths at and below `over` are left over; those at and below `aside`, and those
    `takes` refuses, are not asked for. Returns None if all is taken."""
    paths, roots, others = terminals(tree), frozenset(over), frozenset((*over, *aside))
    untaken = [not takes(path) or _below(path, others) for path in paths]
    if not any(untaken):
        return None
    return Unmatched(paths, _packed([_below(path, roots) for path in paths]), _packed(untaken))


def unmatched_by_all(encoded: Sequence[bytes]) -> bytes:
    """Returns what no rank takes although one names its entry: packed bits per terminal, empty for nothing.

    `encoded[rank]` is `Unmatched.encode`, empty for a rank that takes all. Returns nothing if ranks name the terminals
    differently.
    """
    if not all(encoded) or len({one[:_MARK_BYTES] for one in encoded}) > 1:
        return b""
    columns = [np.frombuffer(zlib.decompress(one[_MARK_BYTES:]), np.uint8).reshape(2, -1) for one in encoded]
    over, untaken = np.stack(columns, axis=1)
    found: np.ndarray[Any, np.dtype[np.uint8]] = np.bitwise_or.reduce(over) & np.bitwise_and.reduce(untaken)
    return found.tobytes() if found.any() else b""


def _below(path: str, roots: frozenset[str]) -> bool:
    return not roots.isdisjoint(lineage(path))


def _packed(bits: Sequence[bool]) -> bytes:
    return np.packbits(np.array(bits, bool)).tobytes()
