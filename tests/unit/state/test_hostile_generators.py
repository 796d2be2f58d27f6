"""A generator's state from a checkpoint is checked before numpy takes it: numpy itself reads where the state says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tenuto.errors import CorruptionError
from tenuto.state.encode.flattener import flatten
from tenuto.state.restore.match import match_state


def restored(value: Any, name: str, wrong: Any) -> Any:
    """`value` flattened, with `wrong` in place of the field `name` of its state, and restored."""
    found = flatten({"v": value})
    fields = found.tree["i"][0][1]["v"]["i"]
    inside = [pair for key, node in fields if key == "state" for pair in node["i"]]
    (field,) = [pair for pair in [*fields, *inside] if pair[0] == name]
    field[1] = wrong
    prepared = match_state(found.tree, None, list(found.specs), None)
    for number, sink in prepared.wants:
        data = np.ascontiguousarray(found.sources[number]).view(np.uint8).reshape(-1)
        if sink.buffer is None:
            sink.fill(memoryview(data))
        else:
            memoryview(sink.buffer).cast("B")[:] = data.data
    return prepared.apply()["v"]


@pytest.mark.parametrize(
    ("kind", "field", "wrong"),
    [
        (np.random.MT19937, "pos", -1),
        (np.random.MT19937, "pos", 625),
        (np.random.MT19937, "pos", 2**31),
        (np.random.Philox, "buffer_pos", -1),
        (np.random.Philox, "buffer_pos", 5),
        (np.random.PCG64, "inc", {"!": "int", "v": str(2**200)}),
        (np.random.PCG64, "has_uint32", 2**40),
    ],
)
def test_i10_a_state_that_numpy_would_read_memory_by_or_cannot_hold_is_refused(
    kind: Any, field: str, wrong: Any
) -> None:
    with pytest.raises(CorruptionError):
        restored(np.random.Generator(kind(3)), field, wrong)


@pytest.mark.parametrize(
    ("kind", "field", "right"), [(np.random.MT19937, "pos", 624), (np.random.Philox, "buffer_pos", 4)]
)
def test_the_end_of_the_words_is_a_place_where_a_generator_may_stand(kind: Any, field: str, right: int) -> None:
    assert restored(np.random.Generator(kind(3)), field, right).random() >= 0
