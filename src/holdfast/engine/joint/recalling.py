"""What one of several ranks has sealed, read back into a state that it holds in the same way."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from holdfast.engine.images import Image, check_image
from holdfast.engine.joint.structure import box_of
from holdfast.engine.read import read_leaves
from holdfast.engine.restore import Prepare
from holdfast.errors import CorruptionError, ShardMismatch
from holdfast.events import Emitter
from holdfast.model.box import Box
from holdfast.model.checkpoint import Index, Json, Manifest
from holdfast.state.contract import Form, Prepared, Sink
from holdfast.state.wholes import Wholes, told_forms

_NOTHING: Final = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Own:
    """What an image says of the leaves of which it holds rows, each as a whole, and the private tree of its rank."""

    specs: Wholes
    private: Json


@dataclass(frozen=True, slots=True)
class Recalled:
    """An image matched with a state. `wants`: rows of its index, and where their bytes go; `nothing`: where nothing
    goes."""

    manifest: Manifest
    index: Index
    prepared: Prepared
    wants: list[tuple[int, Sink]]
    nothing: list[Sink]

    def read(self, image: Image, emitter: Emitter) -> int:
        """Fills the state, every chunk verified; the bytes. CorruptionError."""
        for sink in self.nothing:
            sink.fill(_NOTHING)
        return read_leaves(image.repo, self.manifest, self.index, self.wants, emitter=emitter)


def recall(image: Image, prepare: Prepare, *, verify: bool) -> Recalled:
    """Matches an image with a state, and touches nothing yet. `verify`: every byte is read and digested as well.

    Raises CorruptionError, ShardMismatch where the state holds other boxes than the image, and what `prepare` raises.
    """
    manifest = image.manifest()
    index = image.repo.index(manifest, image.footer.rank)
    manifest = replace(manifest, indexes=manifest.indexes * image.footer.ranks)  # each has its own, in its own memory
    told = Own(wholes(manifest.tree, index), index.private)
    prepared = prepare(manifest, told)
    rows = _rows(index)
    wants: list[tuple[int, Sink]] = []
    nothing: list[Sink] = []
    boxes = prepared.boxes or [None] * len(prepared.wants)
    for (leaf, sink), box in zip(prepared.wants, boxes, strict=True):
        spec = told.specs[leaf]
        wanted = Box.whole(spec.shape) if box is None else box
        row = rows.get((leaf, wanted))
        if row is not None:
            wants.append((row, sink))
        elif wanted.empty:
            nothing.append(sink)
        else:
            raise ShardMismatch(
                f"{spec.path}: this rank holds another part of it than the one that kept it in memory",
                subject=spec.path,
            )
    if verify:
        check_image(image, index)
    return Recalled(manifest, index, prepared, wants, nothing)


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
