"""What one of several ranks has sealed, read back into a state that it holds in the same way."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from holdfast.engine.images import Image, check_image
from holdfast.engine.joint.structure import box_of
from holdfast.engine.read import Staged, read_leaves
from holdfast.engine.restore import Prepare
from holdfast.errors import CorruptionError, ShardMismatch
from holdfast.events import Emitter
from holdfast.model.box import Box
from holdfast.model.checkpoint import Index, Json, Manifest
from holdfast.state.contract import Buffer, Form, Prepared, Sink
from holdfast.state.prepare import refuse_left_over
from holdfast.state.wholes import Wholes, told_forms

Whole = tuple[str, str, tuple[int, ...]]
"""Path, dtype name and shape of a leaf, all of it."""
LENT_BYTES: Final = 64 << 20
"""So much a rank may lack and have from others, through the one place where all meet. More is no buffers: it is another
layout."""
_NOTHING: Final = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Own:
    """What an image says of the leaves of which it holds rows, each as a whole, and the private tree of its rank."""

    specs: Wholes
    private: Json


@dataclass(frozen=True, slots=True)
class Recalled:
    """An image matched with a state. `rows`: those of its index, by leaf and box."""

    manifest: Manifest
    index: Index
    prepared: Prepared
    specs: Wholes
    rows: Mapping[tuple[int, Box], int]
    wants: list[tuple[int, Sink]] = field(default_factory=list)
    """Rows, and where their bytes go."""
    nothing: list[Sink] = field(default_factory=list)
    """Where nothing goes."""
    lacking: list[tuple[Whole, Sink]] = field(default_factory=list)
    """What this image has nothing of, so that it can only come from other ranks (`lending`), and where it goes."""
    lent: list[tuple[Sink, Buffer]] = field(default_factory=list)
    """What has come of that."""

    def read(self, image: Image, emitter: Emitter) -> int:
        """Fills the state, every chunk verified; the bytes. CorruptionError."""
        assert len(self.lent) == len(self.lacking), "taken before"
        for sink in self.nothing:
            sink.fill(_NOTHING)
        for sink, data in self.lent:
            sink.fill(data)
        nbytes = read_leaves(image.repo, self.manifest, self.index, self.wants, emitter=emitter)
        return nbytes + sum(len(data) for _, data in self.lent)

    def held(self, image: Image, wanted: Collection[Whole], emitter: Emitter) -> dict[Whole, bytes]:
        """What this image has of leaves that other ranks lack, every chunk verified. CorruptionError."""
        staged: list[tuple[Whole, int, Staged]] = []
        for leaf in range(self.specs.shared if wanted else 0):
            whole = _whole(self.specs, leaf)
            row = self.rows.get((leaf, Box.whole(whole[2]))) if whole in wanted else None
            if row is not None:
                staged.append((whole, row, Staged(self.specs[leaf].nbytes)))
        read_leaves(image.repo, self.manifest, self.index, [(row, sink) for _, row, sink in staged], emitter=emitter)
        return {whole: sink.data.tobytes() for whole, _, sink in staged}

    def take(self, found: Mapping[Whole, bytes]) -> None:
        """What the images of all ranks have of leaves that some lack. Fills nothing yet. ShardMismatch where this one
        lacks another."""
        for whole, sink in self.lacking:
            if whole not in found:
                raise ShardMismatch(f"{whole[0]}: no rank has all of it in memory", subject=whole[0])
            self.lent.append((sink, np.frombuffer(found[whole], np.uint8)))


def recall(image: Image, prepare: Prepare, *, verify: bool) -> Recalled:
    """Matches an image with a state, and touches nothing yet. `verify`: every byte is read and digested as well.

    Raises CorruptionError, ShardMismatch where the state holds other boxes than the image, StateMismatch where it has
    no place for some of it, and what `prepare` raises.
    """
    manifest = image.manifest()
    index = image.repo.index(manifest, image.footer.rank)
    manifest = replace(manifest, indexes=manifest.indexes * image.footer.ranks)  # each has its own, in its own memory
    told = Own(wholes(manifest.tree, index), index.private)
    prepared = prepare(manifest, told)
    left = prepared.left_over
    if left is not None:  # an image has what this very rank held: no other takes what it leaves over
        refuse_left_over(left.named(left.over))
    found = Recalled(manifest, index, prepared, told.specs, _rows(index))
    _match(found)
    if verify:
        check_image(image, index)
    return found


def _match(found: Recalled) -> None:
    """Says where each wanted box comes from. ShardMismatch."""
    specs, kept, room = found.specs, frozenset(_leaves(found.index)), LENT_BYTES
    boxes = found.prepared.boxes or [None] * len(found.prepared.wants)
    for (leaf, sink), box in zip(found.prepared.wants, boxes, strict=True):
        spec = specs[leaf]
        wanted = Box.whole(spec.shape) if box is None else box
        row = found.rows.get((leaf, wanted))
        if row is not None:
            found.wants.append((row, sink))
        elif wanted.empty:
            found.nothing.append(sink)
        elif wanted.shape == spec.shape and leaf not in kept and not spec.private and spec.nbytes <= room:
            room -= spec.nbytes
            found.lacking.append((_whole(specs, leaf), sink))
        else:
            raise ShardMismatch(
                f"{spec.path}: this rank holds another part of it than the one that kept it in memory",
                subject=spec.path,
            )


def _whole(specs: Wholes, leaf: int) -> Whole:
    spec = specs[leaf]
    return spec.path, spec.dtype, spec.shape


def wholes(tree: Json, index: Index) -> Wholes:
    """The leaves that an image's trees name, each as a whole. CorruptionError where nothing tells of one."""
    forms: dict[int, Form] = told_forms(tree)
    forms.update((leaf, (spec.dtype, spec.leaf_shape)) for leaf, spec in zip(_leaves(index), index.specs, strict=True))
    if sorted(forms) != list(range(len(forms))):
        raise CorruptionError("the image does not describe all leaves that it names")
    return Wholes(tree, index.private, [forms[leaf] for leaf in range(len(forms))])


def _leaves(index: Index) -> list[int]:
    """The number of each row's leaf."""
    return list(range(len(index.specs))) if index.leaf is None else index.leaf.tolist()


def _rows(index: Index) -> dict[tuple[int, Box], int]:
    """The row of each box of each leaf."""
    return {(leaf, box_of(spec)): row for row, (leaf, spec) in enumerate(zip(_leaves(index), index.specs, strict=True))}
