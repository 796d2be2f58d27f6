"""Which ranks of a job share this node's memory, and what they read together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Any

from tenuto.engine.read.node_share import MOST_RANKS, WINDOW_BYTES, NodeSharedReads
from tenuto.engine.read.peer_window import WindowAddress
from tenuto.engine.staging import slots
from tenuto.engine.staging.arena import free_shared_memory
from tenuto.events import Emitter
from tenuto.model import canonical_json
from tenuto.model.records import Json, Owner
from tenuto.ranks.agreement import Agreement
from tenuto.repo.process import this_process

_ROOT = slots.SHARED_MEMORY


@dataclass(frozen=True, slots=True)
class NodePeers:
    """The ranks of one node, this one too, in order of their numbers. `owners`: their processes."""

    session: str
    ranks: Sequence[int]
    owners: Sequence[Owner]
    own: int
    """This rank's place among them."""

    @classmethod
    def meet(cls, agreement: Agreement, deadline_s: float) -> NodePeers | None:
        """Who is here; None where this rank is alone on its node, or its node has no shared memory. One round of
        messages: every rank calls it. Raises what `Topic.gather` does."""
        free_shared_memory()
        own = [_memory_here(), *astuple(this_process())]
        phase = "telling where each rank runs"
        with agreement.round("node") as round:
            round.send(canonical_json.dumps(own))
            if agreement.is_coordinator:
                said = [canonical_json.loads(one) for one in round.gather(deadline_s, phase)]
                round.broadcast(b"", [canonical_json.dumps(one) for one in _beside_each(said)])
            round.receive(deadline_s, phase)
            told = canonical_json.loads(round.own_reply())
        if not told:
            return None
        ranks = [rank for rank, _ in told]
        return cls(agreement.session.id, ranks, [Owner(*owner) for _, owner in told], ranks.index(agreement.rank))

    def reads(
        self, number: int, *, patience_s: float, emitter: Emitter, window_bytes: int = WINDOW_BYTES
    ) -> NodeSharedReads:
        """What is read together of one checkpoint. `number`: the same on all ranks, and another each time."""
        windows = [
            WindowAddress(slots.Slot(_ROOT, f"reads/{self.session}", f"{rank}-{number}"), owner)
            for rank, owner in zip(self.ranks, self.owners, strict=True)
        ]
        return NodeSharedReads(windows, self.own, patience_s=patience_s, window_bytes=window_bytes, emitter=emitter)


def _beside_each(said: Sequence[Sequence[Any]]) -> list[Json]:
    """By rank who is on its node, this rank too: rank and process of each. Empty where that is nobody else, or too
    many. Each is told only of its own: what thousands tell thousands does not fit anywhere."""
    found: dict[tuple[Any, ...], list[Json]] = {}
    places = [(memory, *owner[:2]) for memory, *owner in said]
    for rank, (place, (_, *owner)) in enumerate(zip(places, said, strict=True)):
        found.setdefault(place, []).append([rank, owner])
    return [found[place] if place[0] and 1 < len(found[place]) <= MOST_RANKS else [] for place in places]


def _memory_here() -> str:
    """Equal for processes that see the same files in shared memory; empty where there are none."""
    with suppress(OSError):
        status = os.stat(_ROOT)
        return f"{os.geteuid()} {status.st_dev} {status.st_ino}"
    return ""
