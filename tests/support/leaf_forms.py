"""The forms of all leaves that one rank holds."""

from __future__ import annotations

from tenuto.repo.format.leaf_table import leaf_forms
from tenuto.state.contract import Flattened, Form


def forms_of(flattened: Flattened) -> list[Form]:
    """Returns dtype and full shape of every leaf in the trees of one rank, by number."""
    numbers = range(len(flattened.specs)) if flattened.leaf is None else flattened.leaf
    found = leaf_forms(flattened.tree)
    found.update((number, (spec.dtype, spec.leaf_shape)) for number, spec in zip(numbers, flattened.specs, strict=True))
    return [found[number] for number in range(len(found))]
