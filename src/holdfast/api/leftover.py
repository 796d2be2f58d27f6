"""What no rank of a job takes of a checkpoint: a stage that leaves over what others take is no mismatch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast.api.company import Company
from holdfast.model.checkpoint import Json
from holdfast.state.prepare import refuse_left_over, terminals


def refuse_what_none_takes(company: Company, tree: Json, left_over: bytes, deadline_s: float) -> None:
    """On every rank, each with what its own target leaves over: StateMismatch, the same on all, for what all do."""
    with company.agreement.topic("left over") as topic:
        topic.post(left_over)
        if company.coordinates:
            topic.announce(_of_all(topic.collect(deadline_s, "what no rank takes")))
        found = topic.hear(deadline_s, "what no rank takes")
    if found:
        paths = terminals(tree)
        refuse_left_over([paths[at] for at in np.flatnonzero(_bits(found))])


def _of_all(said: Sequence[bytes]) -> bytes:
    """What is left over by every rank; empty for nothing."""
    if not all(said) or len({len(one) for one in said}) != 1:
        return b""
    found = np.bitwise_and.reduce([np.frombuffer(one, np.uint8) for one in said])
    return found.tobytes() if found.any() else b""


def _bits(packed: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.unpackbits(np.frombuffer(packed, np.uint8))
