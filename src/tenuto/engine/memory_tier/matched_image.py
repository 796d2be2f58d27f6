"""What one of several ranks has sealed, matched with a state that it holds in the same way, and read back into it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field, replace
from itertools import accumulate
from typing import Final

import numpy as np

from tenuto.engine.memory_tier.image_store import Image, check_image
from tenuto.engine.read.choose import FullLeaves, Prepare
from tenuto.engine.read.leaf_reader import Staged, read_leaves
from tenuto.errors import CorruptionError, ShardMismatch
from tenuto.events import Emitter
from tenuto.model import canonical_json
from tenuto.model.leaf import Box, LeafSpec
from tenuto.model.records import Index, Json, Manifest
from tenuto.ranks.round import Round
from tenuto.record import record
from tenuto.repo.format.leaf_table import LeafTable, leaf_forms
from tenuto.state.contract import Buffer, Form, Prepared, Sink
from tenuto.state.restore.match import refuse_unmatched

LeafShape = tuple[str, str, tuple[int, ...]]
"""Path, dtype name and shape of a leaf, all of it."""
SHARED_BYTES: Final = 64 << 20
"""Bytes that a rank may lack and get from others, through the ranks' key-value store. More are no buffers but another
layout."""
_NOTHING: Final = np.empty(0, np.uint8)


@record
class MatchedImage:
    """An image matched with a state. `rows`: those of its index, by leaf and box."""

    manifest: Manifest
    index: Index
    prepared: Prepared
    specs: LeafTable
    rows: Mapping[tuple[int, Box], int]
    wants: list[tuple[int, Sink]] = field(default_factory=list)
    """Rows, and where their bytes go."""
    nothing: list[Sink] = field(default_factory=list)
    """Where nothing goes."""
    lacking: list[tuple[LeafShape, Sink]] = field(default_factory=list)
    """Leaves that can only come from other ranks (`share_buffers`), and where they go."""
    shared: list[tuple[Sink, Buffer]] = field(default_factory=list)
    """Those, once they have come."""

    def read(self, image: Image, emitter: Emitter) -> int:
        """Fills the state, every chunk verified; returns the bytes. CorruptionError."""
        assert len(self.shared) == len(self.lacking), "taken before"
        for sink in self.nothing:
            sink.fill(_NOTHING)
        for sink, data in self.shared:
            sink.fill(data)
        nbytes = read_leaves(image.repo, self.manifest, self.index, self.wants, emitter=emitter)
        return nbytes + sum(len(data) for _, data in self.shared)

    def read_shared(self, image: Image, wanted: Collection[LeafShape], emitter: Emitter) -> dict[LeafShape, bytes]:
        """Returns what this image has of leaves that other ranks lack, every chunk verified. CorruptionError."""
        staged: list[tuple[LeafShape, int, Staged]] = []
        for leaf in range(self.specs.shared if wanted else 0):
            shape = _shape(self.specs, leaf)
            row = self.rows.get((leaf, Box.whole(shape[2]))) if shape in wanted else None
            if row is not None:
                staged.append((shape, row, Staged(self.specs[leaf].nbytes)))
        read_leaves(image.repo, self.manifest, self.index, [(row, sink) for _, row, sink in staged], emitter=emitter)
        return {shape: sink.data.tobytes() for shape, _, sink in staged}

    def take(self, found: Mapping[LeafShape, bytes]) -> None:
        """Takes what this image lacks from `found`, what the images of all ranks have. Fills nothing yet. ShardMismatch
        where it lacks another leaf."""
        for shape, sink in self.lacking:
            if shape not in found:
                raise ShardMismatch(f"{shape[0]}: no rank has all of it in memory", subject=shape[0])
            self.shared.append((sink, np.frombuffer(found[shape], np.uint8)))


def match_image(image: Image, prepare: Prepare, *, verify: bool) -> MatchedImage:
    """Matches an image with a state, and touches nothing yet. `verify`: every byte is read and digested as well.

    Raises CorruptionError, ShardMismatch where the state holds other boxes than the image, StateMismatch where it has
    no place for some of it, and what `prepare` raises.
    """
    manifest = image.manifest()
    index = image.repo.index(manifest, image.footer.rank)
    manifest = replace(manifest, indexes=manifest.indexes * image.footer.ranks)  # each has its own, in its own memory
    specs = leaf_shapes(manifest.tree, index)
    prepared = prepare(manifest, FullLeaves(specs, index.private))
    left = prepared.unmatched
    if left is not None:  # an image has what this very rank has: no other takes what it leaves over
        refuse_unmatched(left.named(left.over))
    found = MatchedImage(manifest, index, prepared, specs, _rows(index))
    _match(found)
    if verify:
        check_image(image, index)
    return found


def _match(found: MatchedImage) -> None:
    """Finds where each wanted box comes from. ShardMismatch."""
    specs, sealed, room = found.specs, frozenset(_leaves(found.index)), SHARED_BYTES
    boxes = found.prepared.boxes or [None] * len(found.prepared.wants)
    for (leaf, sink), box in zip(found.prepared.wants, boxes, strict=True):
        spec = specs[leaf]
        wanted = Box.whole(spec.shape) if box is None else box
        row = found.rows.get((leaf, wanted))
        if row is not None:
            found.wants.append((row, sink))
        elif wanted.empty:
            found.nothing.append(sink)
        elif wanted.shape == spec.shape and leaf not in sealed and not spec.private and spec.nbytes <= room:
            room -= spec.nbytes
            found.lacking.append((_shape(specs, leaf), sink))
        else:
            raise ShardMismatch(
                f"{spec.path}: this rank holds another part of it than the one that kept it in memory",
                subject=spec.path,
            )


def _shape(specs: LeafTable, leaf: int) -> LeafShape:
    spec = specs[leaf]
    return spec.path, spec.dtype, spec.shape


def leaf_shapes(tree: Json, index: Index) -> LeafTable:
    """Returns the full shapes of the leaves that an image's trees name. CorruptionError where one is not described."""
    forms: dict[int, Form] = leaf_forms(tree)
    forms.update((leaf, (spec.dtype, spec.leaf_shape)) for leaf, spec in zip(_leaves(index), index.specs, strict=True))
    if sorted(forms) != list(range(len(forms))):
        raise CorruptionError("the image does not describe all leaves that it names")
    return LeafTable(tree, index.private, [forms[leaf] for leaf in range(len(forms))])


def _leaves(index: Index) -> list[int]:
    """The number of each row's leaf."""
    return list(range(len(index.specs))) if index.leaf is None else index.leaf.tolist()


def _rows(index: Index) -> dict[tuple[int, Box], int]:
    """The row of each box of each leaf."""
    return {(leaf, spec.box): row for row, (leaf, spec) in enumerate(zip(_leaves(index), index.specs, strict=True))}


# --------------------------------------------------------------------------------------------------
# Leaves that only some ranks have in memory and others want too: sent from their images at a restart, in two rounds.
#
# Buffers of a module in `DistributedDataParallel` are such leaves: the first rank's are saved, and every rank gets them
# back from the store. An image has only what counts on its own rank.

_PHASE: Final = "handing on what only some ranks have in memory"


def share_buffers(
    image: Image, matched: MatchedImage, round: Callable[[], Round], *, deadline_s: float, emitter: Emitter
) -> Callable[[], None]:
    """Exchanges leaves that some ranks lack. Called by all ranks where one of them lacks something. `round` opens the
    next round. Raises what `Round.gather` and `Round.receive` do.

    What is returned takes what this rank lacks, and fills nothing yet. It raises CorruptionError where this rank's
    image cannot be read, ShardMismatch where no rank has what this one lacks.
    """
    wanted = _lacking_anywhere([shape for shape, _ in matched.lacking], round, deadline_s)
    damaged: CorruptionError | None = None
    own: Mapping[LeafShape, bytes] = {}
    try:
        own = matched.read_shared(image, frozenset(wanted), emitter)
    except CorruptionError as error:  # raised once all have received what there is
        damaged = error
    with round() as values:
        values.send(_pack(own))
        if values.coordinates:
            posts = [_unpack(post) for post in values.gather(deadline_s, _PHASE)]
            values.broadcast(_pack({shape: data for each in reversed(posts) for shape, data in each.items()}))
        found = _unpack(values.receive(deadline_s, _PHASE))

    def take() -> None:
        if damaged is not None:
            raise damaged
        matched.take(found)

    return take


def _lacking_anywhere(lacks: Sequence[LeafShape], round: Callable[[], Round], deadline_s: float) -> list[LeafShape]:
    """Returns what some rank lacks, each once."""
    with round() as names:
        names.send(_name(lacks))
        if names.coordinates:
            posts = [_read(post) for post in names.gather(deadline_s, _PHASE)]
            names.broadcast(_name(sorted({shape for each in posts for shape in each})))
        return _read(names.receive(deadline_s, _PHASE))


def _name(shapes: Sequence[LeafShape]) -> bytes:
    return canonical_json.dumps([[path, dtype, list(shape)] for path, dtype, shape in shapes])


def _read(post: bytes) -> list[LeafShape]:
    return [(path, dtype, tuple(shape)) for path, dtype, shape in canonical_json.loads(post)]


def _pack(values: Mapping[LeafShape, bytes]) -> bytes:
    return _name(list(values)) + b"\n" + b"".join(values.values())


def _unpack(post: bytes) -> dict[LeafShape, bytes]:
    head, _, data = post.partition(b"\n")
    shapes = _read(head)
    ends = list(accumulate(LeafSpec(*shape).nbytes for shape in shapes))
    return {shape: data[begin:end] for shape, begin, end in zip(shapes, [0, *ends], ends, strict=False)}
