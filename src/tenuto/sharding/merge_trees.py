"""Merges the ranks' trees: shared entries once, and every rank's entries where mappings differ.

Pipeline stages and experts give ranks different entries of the same mappings. Nothing else may differ: a differing
plain value would be restored as one rank's value on all of them. Equal trees, which nearly all of thousands are, are
recognised by their digests; only different ones are walked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, Final

import numpy as np

from tenuto.errors import CorruptionError, ShardMismatch
from tenuto.model import canonical_json
from tenuto.model.leaf import join
from tenuto.model.records import Json
from tenuto.record import record
from tenuto.sharding.holdings import Column, rank_names
from tenuto.state.tree import (
    FIRST_RANK,
    KEYED,
    LEAVES,
    NAMED,
    ROOT,
    SEQUENCES,
    WRAPPERS,
    children,
    is_part,
    is_plain,
    items,
    kind_of,
    leaf_paths,
    name_of,
    segment,
    sequence,
)

PER_RANK: Final = "what belongs to each rank by itself is declared: tenuto.per_rank(…)"
SHOWN: Final = 40
"""Characters of a value shown in errors."""
_MAPPINGS: Final = KEYED | {"module", "bypath"}
_CONTENT: Final = frozenset({"i", "v", "meta"})
"""Fields of a node that hold other nodes."""


@record(eq=False)
class Union:
    """The merged tree.

    paths: the path of each leaf by number, 0..`len(paths)` - 1.
    numbers: `numbers[r]` maps rank r's leaf numbers to the merged ones; ranks with equal trees share the array.
    """

    tree: Json
    paths: Sequence[str]
    numbers: Sequence[Column]


def unite(trees: Sequence[Json], digests: Sequence[Hashable] | None = None) -> Union:
    """Merges the shared trees of all ranks, at least one; `trees[r]` is that of rank r.

    digests: equal for ranks with equal trees, and for no others; without them, trees are compared by their spelling.

    Returns the tree unchanged if all are equal. Raises ShardMismatch, naming path and ranks, if anything but the
    entries of mappings differs.
    """
    kinds = _kinds(trees, digests)
    if len(kinds) == 1:
        paths = leaf_paths(trees[0])
        return Union(trees[0], paths, [np.arange(len(paths))] * len(trees))
    merger = _Merger(kinds)
    tree = merger.merge([_At(number, trees[ranks[0]]) for number, ranks in enumerate(kinds)], "")
    maps = merger.numbers()
    found: list[Column] = [maps[0]] * len(trees)
    for ranks, one in zip(kinds, maps, strict=True):
        for rank in ranks:
            found[rank] = one
    return Union(tree, leaf_paths(tree), found)


def _kinds(trees: Sequence[Json], digests: Sequence[Hashable] | None) -> list[list[int]]:
    """Groups ranks with equal trees."""
    found: dict[Hashable, list[int]] = {}
    spelled: dict[int, bytes] = {}
    for rank, tree in enumerate(trees):
        mark: Hashable = digests[rank] if digests is not None else spelled.get(id(tree))
        if mark is None:
            mark = spelled[id(tree)] = canonical_json.dumps(tree)
        found.setdefault(mark, []).append(rank)
    return list(found.values())


@record
class _At:
    """A node of the `tree`-th distinct tree."""

    tree: int
    node: Json


class _Merger:
    """Walks distinct trees in parallel. `ranks[t]`: the ranks that have the t-th."""

    def __init__(self, ranks: Sequence[Sequence[int]]) -> None:
        self._ranks = ranks
        self._leaves: list[list[tuple[int, int]]] = []
        """For each new leaf, pairs (tree, number in that tree)."""
        self._aliases: list[tuple[str, dict[str, Any], Sequence[_At]]] = []

    def merge(self, nodes: Sequence[_At], path: str, within: str = "") -> Json:
        """Merges `nodes`, which all have one path. `within`: the part of an optimizer that they are, if any."""
        counting = [one for one in nodes if kind_of(one.node) != FIRST_RANK]
        if len(counting) < len(nodes):
            nodes = self._of_first_rank(counting, nodes, path)
        first = nodes[0].node
        kind = kind_of(first)
        for one in nodes[1:]:
            if kind_of(one.node) != kind:
                raise self._differ(nodes[0], one, path)
        if kind in LEAVES:
            return self._leaf(nodes, path)
        if kind in _MAPPINGS:
            return self._mapping(nodes, path, within)
        if kind in NAMED:
            return self._named(nodes, path)
        if kind == "list" or kind in SEQUENCES:
            return self._sequence(nodes, path, "group" if within == "groups" else "")
        if kind in WRAPPERS:
            self._same_but_content(nodes, path)
            below = [_At(one.tree, children(one.node, path)[0][1]) for one in nodes]
            return first | {"v": self.merge(below, path, "optimizer" if kind == "optimizer" else "")}
        self._same(nodes, [one.node for one in nodes], path)
        return first

    def _of_first_rank(self, counting: list[_At], nodes: Sequence[_At], path: str) -> list[_At]:
        having = [rank for one in counting for rank in self._ranks[one.tree]]
        if having == [0]:
            return counting
        others = rank_names(rank for one in nodes if one not in counting for rank in self._ranks[one.tree])
        raise ShardMismatch(
            f"{path or ROOT} is declared as the first rank's on {others}, and not on all",
            subject=path or ROOT,
            hint="all ranks declare it: tenuto.first_rank(…)",
        )

    def _mapping(self, nodes: Sequence[_At], path: str, within: str) -> Json:
        """Merges every entry that any node has, in the order of the first node, then of the others."""
        self._same_but_content(nodes, path)
        kind = kind_of(nodes[0].node)
        entries: dict[Hashable, tuple[Json, list[_At]]] = {}
        for one in nodes:
            for key, child in items(one.node):
                mark: Hashable = key if type(key) is str else canonical_json.dumps(key)
                entries.setdefault(mark, (key, []))[1].append(_At(one.tree, child))
        free = kind in ("module", "bypath") or within == "optimizer"
        pairs: list[Json] = []
        for mark, (key, some) in entries.items():
            where = join(path, name_of(key) if kind == "bypath" else segment(key))
            if len(some) != len(nodes) and not free:
                # A plain value is restored as a unit: entries of some ranks would reach the others too.
                free = not all(is_plain(one.node) for one in nodes)
                if not free:
                    raise self._lacking(nodes, some, where)
            if within == "group" and mark == "params":
                pairs.append([key, list(dict.fromkeys(name_of(name) for one in some for name in sequence(one.node)))])
            else:
                part = "groups" if within == "optimizer" and mark == "param_groups" else ""
                pairs.append([key, self.merge(some, where, part)])
        made: dict[str, Json] = nodes[0].node | {"i": pairs}
        if "meta" in made:
            made["meta"] = self._metadata(nodes, path)
        return made

    def _metadata(self, nodes: Sequence[_At], path: str) -> list[Json]:
        """Merges the metadata of modules by the names of their parts."""
        found: dict[str, _At] = {}
        for one in nodes:
            for name, content in items(one.node, "meta"):
                known = found.setdefault(name_of(name), _At(one.tree, content))
                self._same([known, one], [known.node, content], f"{path or ROOT} (metadata of {name!r})")
        return [[name, one.node] for name, one in found.items()]

    def _named(self, nodes: Sequence[_At], path: str) -> Json:
        self._same_but_content(nodes, path)
        lines = [items(one.node) for one in nodes]
        for one, line in zip(nodes, lines, strict=True):
            if [name for name, _ in line] != [name for name, _ in lines[0]]:
                raise self._differ(nodes[0], one, path)
        pairs: list[Json] = []
        for some in zip(*lines, strict=True):
            name = name_of(some[0][0])
            below = [_At(one.tree, child) for one, (_, child) in zip(nodes, some, strict=True)]
            pairs.append([name, self.merge(below, join(path, segment(name)))])
        made: Json = nodes[0].node | {"i": pairs}
        return made

    def _sequence(self, nodes: Sequence[_At], path: str, within: str) -> Json:
        first = nodes[0].node
        if type(first) is dict:
            self._same_but_content(nodes, path)
        lines = [sequence(one.node) for one in nodes]
        for one, line in zip(nodes, lines, strict=True):
            if len(line) != len(lines[0]):
                raise self._groups_differ(nodes[0], one, path) if within else self._differ(nodes[0], one, path)
        made = [
            self.merge(
                [_At(one.tree, child) for one, child in zip(nodes, some, strict=True)], join(path, str(at)), within
            )
            for at, some in enumerate(zip(*lines, strict=True))
        ]
        return first | {"i": made} if type(first) is dict else made

    def _leaf(self, nodes: Sequence[_At], path: str) -> Json:
        """Numbers a leaf in walk order; an alias gets its leaf's number once all leaves are numbered."""
        self._same(nodes, [{**one.node, "n": 0} for one in nodes], path)
        made: dict[str, Json] = {**nodes[0].node, "n": len(self._leaves)}
        if made["!"] == "alias":
            self._aliases.append((path, made, nodes))
        else:
            self._leaves.append([(one.tree, one.node.get("n")) for one in nodes])
        return made

    def numbers(self) -> list[Column]:
        """Returns the new leaf numbers of each tree by old number, and sets those of the aliases."""
        known: list[dict[Any, int]] = [{} for _ in self._ranks]
        for number, some in enumerate(self._leaves):
            for tree, old in some:
                known[tree][old] = number
        counts = Counter(tree for some in self._leaves for tree, _ in some)
        maps = [_as_column(one, counts[tree]) for tree, one in enumerate(known)]
        for path, made, nodes in self._aliases:
            meant = [known[one.tree].get(one.node.get("n"), -1) for one in nodes]
            if min(meant) < 0:
                raise CorruptionError(f"{path}: an alias of no leaf", subject=path)
            if len(set(meant)) > 1:
                other = next(at for at, number in enumerate(meant) if number != meant[0])
                raise self._differ(nodes[0], nodes[other], path)
            made["n"] = meant[0]
        return maps

    def _same_but_content(self, nodes: Sequence[_At], path: str) -> None:
        content = [{name: value for name, value in one.node.items() if name not in _CONTENT} for one in nodes]
        self._same(nodes, content, path)

    def _same(self, nodes: Sequence[_At], content: Sequence[Json], path: str) -> None:
        """Compares spellings, so that 1, 1.0 and True differ."""
        if len(nodes) == 1:
            return
        first = canonical_json.dumps(content[0])
        for one, other in zip(nodes[1:], content[1:], strict=True):
            if other is not content[0] and canonical_json.dumps(other) != first:
                raise self._differ(nodes[0], one, path)

    def _differ(self, one: _At, other: _At, path: str) -> ShardMismatch:
        where = path or ROOT
        kinds = {kind_of(one.node), kind_of(other.node)}
        here, there = rank_names(self._ranks[one.tree]), rank_names(self._ranks[other.tree])
        if kinds & LEAVES:
            message = f"{where}: {here} {_describe_leaf(one.node)}, {there} {_describe_leaf(other.node)}"
            return ShardMismatch(message, subject=where, hint=_SAME_FORM)
        message = f"{where} differs between ranks: {_shown(one.node)} on {here}, {_shown(other.node)} on {there}"
        return ShardMismatch(message, subject=where, hint=PER_RANK)

    def _groups_differ(self, one: _At, other: _At, path: str) -> ShardMismatch:
        """Returns the error for optimizers with different numbers of parameter groups, as pipeline stages may have."""
        counts = [f"{len(sequence(at.node))} on {rank_names(self._ranks[at.tree])}" for at in (one, other)]
        return ShardMismatch(
            f"{path}: the numbers of parameter groups differ between ranks: {', '.join(counts)}",
            subject=path,
            hint='give all ranks as many groups, {"params": []} where one has no parameter; or declare that each rank '
            "has its own: tenuto.per_rank(optimizer), and per_rank(scheduler), to resume on as many ranks alone",
        )

    def _lacking(self, nodes: Sequence[_At], some: Sequence[_At], where: str) -> ShardMismatch:
        trees = {one.tree for one in some}
        here, there = (
            rank_names(rank for one in nodes if (one.tree in trees) is having for rank in self._ranks[one.tree])
            for having in (True, False)
        )
        return ShardMismatch(f"{where} is on {here}, and not on {there}", subject=where, hint=PER_RANK)


_SAME_FORM: Final = (
    "build the same model and optimizer on every rank; an optimizer whose state has another form than its parameters "
    "is each rank's own: tenuto.per_rank(optimizer), to resume on as many ranks alone"
)


def _as_column(known: dict[Any, int], count: int) -> Column:
    if {*map(type, known)} - {int} or (known and (min(known) != 0 or max(known) != count - 1 or len(known) != count)):
        raise CorruptionError("the leaf numbers of a rank's tree are not 0 to n - 1, once each")
    return np.array([known[number] for number in range(count)], np.int64)


def _describe_leaf(node: Json) -> str:
    kind = kind_of(node)
    if kind == "leaf" and is_part(node):
        return f"holds a part of a {node.get('dtype')} tensor of shape {node.get('shape')}"
    return {"leaf": "holds a tensor of its own there", "alias": "ties it to another"}.get(kind, "no tensor")


def _shown(node: Json) -> str:
    text = canonical_json.dumps(node).decode()
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
