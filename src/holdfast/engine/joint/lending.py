"""What counts on one rank alone and others want too, handed on at a restart: from its image, over the board.

Buffers of a module in `DistributedDataParallel` are such values: the first rank's are saved, and every rank has them
back from the store. An image has only what counts on its own rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Final

from holdfast.engine.images import Image
from holdfast.engine.joint.recalling import Recalled, Whole
from holdfast.errors import CorruptionError
from holdfast.events import Emitter
from holdfast.model import canonical
from holdfast.model.leaf import LeafSpec
from holdfast.ranks.topic import Topic

_PHASE: Final = "handing on what only some ranks have in memory"


def lend(
    image: Image, recalled: Recalled, topic: Callable[[], Topic], *, deadline_s: float, emitter: Emitter
) -> Callable[[], None]:
    """Called by all ranks where one of them lacks something. `topic` opens the next topic. Raises what `Topic.collect`
    and `Topic.hear` do.

    What is returned takes what this rank lacks, and fills nothing yet. It raises CorruptionError where this rank's
    image cannot be read, ShardMismatch where no rank has what this one lacks.
    """
    wanted = _asked([whole for whole, _ in recalled.lacking], topic, deadline_s)
    damaged: CorruptionError | None = None
    own: Mapping[Whole, bytes] = {}
    try:
        own = recalled.held(image, frozenset(wanted), emitter)
    except CorruptionError as error:  # told to all once they have heard of what there is
        damaged = error
    with topic() as lent:
        lent.post(_packed(own))
        if lent.coordinates:
            told = [_unpacked(one) for one in lent.collect(deadline_s, _PHASE)]
            lent.announce(_packed({whole: data for each in reversed(told) for whole, data in each.items()}))
        found = _unpacked(lent.hear(deadline_s, _PHASE))
    return partial(_take, recalled, found, damaged)


def _take(recalled: Recalled, found: Mapping[Whole, bytes], damaged: CorruptionError | None) -> None:
    if damaged is not None:
        raise damaged
    recalled.take(found)


def _asked(lacks: Sequence[Whole], topic: Callable[[], Topic], deadline_s: float) -> list[Whole]:
    """What some rank lacks: named once, however many do."""
    with topic() as asked:
        asked.post(_named(lacks))
        if asked.coordinates:
            said = [_read(one) for one in asked.collect(deadline_s, _PHASE)]
            asked.announce(_named(sorted({whole for each in said for whole in each})))
        return _read(asked.hear(deadline_s, _PHASE))


def _named(wholes: Sequence[Whole]) -> bytes:
    return canonical.dumps([[path, dtype, list(shape)] for path, dtype, shape in wholes])


def _read(said: bytes) -> list[Whole]:
    return [(path, dtype, tuple(shape)) for path, dtype, shape in canonical.loads(said)]


def _packed(values: Mapping[Whole, bytes]) -> bytes:
    return _named(list(values)) + b"\n" + b"".join(values.values())


def _unpacked(said: bytes) -> dict[Whole, bytes]:
    head, _, data = said.partition(b"\n")
    wholes = _read(head)
    ends = list(accumulate(LeafSpec(*whole).nbytes for whole in wholes))
    return {whole: data[begin:end] for whole, begin, end in zip(wholes, [0, *ends], ends, strict=False)}
