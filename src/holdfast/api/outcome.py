"""How a restore ended on each rank of a job, told in one round: whether it could, what it left over, how long it took
it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.model import canonical
from holdfast.model.checkpoint import Json
from holdfast.model.spread import RankTimings
from holdfast.ranks.contract import Verdict
from holdfast.ranks.topic import REASON, Topic
from holdfast.state.prepare import refuse_left_over, terminals


@dataclass(slots=True)
class Outcome:
    """On one rank. `reason`: why it could not restore its part; empty where it has. `match_s`: until the checkpoint was
    matched with what the rank holds, `read_s`: from there until its `nbytes` were there, verified, without `wait_s`,
    waiting for what its neighbours ask for. `left_over`: of the checkpoint's tree what its target does not take, a bit
    each."""

    reason: str = ""
    match_s: float = 0.0
    read_s: float = 0.0
    wait_s: float = 0.0
    nbytes: int = 0
    left_over: bytes = b""

    def done(self, seconds: float, wait_s: float, nbytes: int, left_over: bytes) -> None:
        self.read_s, self.wait_s = max(seconds - self.match_s - wait_s, 0.0), wait_s
        self.nbytes, self.left_over = nbytes, left_over

    def encode(self) -> bytes:
        took = [*(round(one * 1e6) for one in (self.match_s, self.read_s, self.wait_s)), self.nbytes]
        reason = self.reason[:REASON].encode("utf-8", "replace").decode()  # it may quote what is no text
        return canonical.dumps({"reason": reason, "took": took}) + b"\n" + self.left_over

    @classmethod
    def decode(cls, data: bytes) -> Outcome:
        head, _, left_over = data.partition(b"\n")
        said = canonical.loads(head)
        *took, nbytes = said["took"]
        match_s, read_s, wait_s = (one / 1e6 for one in took)
        return cls(str(said["reason"]), match_s, read_s, wait_s, int(nbytes), left_over)


@dataclass(frozen=True, slots=True)
class Heard:
    """The same on all ranks. `left_over`: what no rank takes; empty for nothing. `ranks`: where the time went on each;
    None where some could not."""

    verdict: Verdict
    left_over: bytes
    ranks: RankTimings | None


def agreed(topic: Topic, own: Outcome, deadline_s: float, phase: str) -> Heard:
    """On every rank, each with its own outcome. Raises what `Topic.collect` does."""
    topic.post(own.encode())
    if topic.coordinates:
        said = [Outcome.decode(one) for one in topic.collect(deadline_s, phase)]
        topic.announce(_of_all(said))
    head, _, left_over = topic.hear(deadline_s, phase).partition(b"\n")
    heard = canonical.loads(head)
    verdict = Verdict({int(rank): str(reason) for rank, reason in heard["reasons"].items()})
    return Heard(verdict, left_over, RankTimings.read(heard["timing"]))


def _of_all(said: Sequence[Outcome]) -> bytes:
    reasons = {str(rank): one.reason for rank, one in enumerate(said) if one.reason}
    timing: Json = None
    left_over = b""
    if not reasons:
        parts = {
            "match_s": [one.match_s for one in said],
            "read_s": [one.read_s for one in said],
            "wait_s": [one.wait_s for one in said],
            "seconds": [one.match_s + one.read_s for one in said],
            "bytes": [float(one.nbytes) for one in said],
        }
        timing = RankTimings.of_parts(len(said), parts).told()
        left_over = _left_over_by_all([one.left_over for one in said])
    return canonical.dumps({"reasons": reasons, "timing": timing}) + b"\n" + left_over


def refuse_what_none_takes(tree: Json, left_over: bytes) -> None:
    """StateMismatch, the same on all ranks, for what all of them leave over: a stage that leaves over what others take
    is no mismatch."""
    if left_over:
        paths = terminals(tree)
        refuse_left_over([paths[at] for at in np.flatnonzero(_bits(left_over))])


def _left_over_by_all(said: Sequence[bytes]) -> bytes:
    if not all(said) or len({len(one) for one in said}) != 1:
        return b""
    found = np.bitwise_and.reduce([np.frombuffer(one, np.uint8) for one in said])
    return found.tobytes() if found.any() else b""


def _bits(packed: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.unpackbits(np.frombuffer(packed, np.uint8))
