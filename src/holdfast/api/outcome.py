"""How a restore goes on each rank of a job, told in two rounds: whether the checkpoint fits what the rank holds, before
any of it is read; and whether it could be read, and how long that took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.model import canonical
from holdfast.model.checkpoint import Json
from holdfast.model.spread import RankTimings
from holdfast.ranks.contract import Verdict
from holdfast.ranks.topic import REASON, Topic
from holdfast.state.left_over import LeftOver, left_by_all
from holdfast.state.prepare import refuse_left_over


@dataclass(slots=True)
class Outcome:
    """On one rank. `reason`: why it could not restore its part; empty where it has. `match_s`: until the checkpoint was
    matched with what the rank holds, `read_s`: from the beginning of reading until its `nbytes` were there, verified,
    without `wait_s`, waiting for what its neighbours ask for."""

    reason: str = ""
    match_s: float = 0.0
    read_s: float = 0.0
    wait_s: float = 0.0
    nbytes: int = 0

    def encode(self) -> bytes:
        took = [*(round(one * 1e6) for one in (self.match_s, self.read_s, self.wait_s)), self.nbytes]
        return canonical.dumps({"reason": _shown(self.reason), "took": took})

    @classmethod
    def decode(cls, data: bytes) -> Outcome:
        said = canonical.loads(data)
        *took, nbytes = said["took"]
        match_s, read_s, wait_s = (one / 1e6 for one in took)
        return cls(str(said["reason"]), match_s, read_s, wait_s, int(nbytes))


def fits(topic: Topic, reason: str, left_over: LeftOver | None, deadline_s: float, phase: str) -> tuple[Verdict, bytes]:
    """On every rank, each with the `reason` why it could not match the checkpoint, empty where it could, and what it
    leaves over: the same verdict on all, and what no rank takes, as `left_by_all` tells it. Raises what `Topic.collect`
    does."""
    topic.post(_joined({"reason": _shown(reason)}, b"" if left_over is None else left_over.encode()))
    if topic.coordinates:
        said = [_divided(one) for one in topic.collect(deadline_s, phase)]
        reasons = _reasons([str(head["reason"]) for head, _ in said])
        topic.announce(_joined({"reasons": reasons}, b"" if reasons else left_by_all([left for _, left in said])))
    head, left = _divided(topic.hear(deadline_s, phase))
    return _verdict(head["reasons"]), left


def refuse_what_none_takes(own: LeftOver | None, left: bytes) -> None:
    """StateMismatch, the same on all ranks, for what none of them takes."""
    if left and own is not None:
        refuse_left_over(own.named(left))


def agreed(topic: Topic, own: Outcome, deadline_s: float, phase: str) -> tuple[Verdict, RankTimings | None]:
    """On every rank, each with its own outcome: the same verdict on all, and where the time went on each; None where
    some could not. Raises what `Topic.collect` does."""
    topic.post(own.encode())
    if topic.coordinates:
        said = [Outcome.decode(one) for one in topic.collect(deadline_s, phase)]
        reasons = _reasons([one.reason for one in said])
        topic.announce(canonical.dumps({"reasons": reasons, "timing": None if reasons else _timing(said)}))
    heard = canonical.loads(topic.hear(deadline_s, phase))
    return _verdict(heard["reasons"]), RankTimings.read(heard["timing"])


def _timing(said: Sequence[Outcome]) -> Json:
    parts = {
        "match_s": [one.match_s for one in said],
        "read_s": [one.read_s for one in said],
        "wait_s": [one.wait_s for one in said],
        "seconds": [one.match_s + one.read_s for one in said],
        "bytes": [float(one.nbytes) for one in said],
    }
    return RankTimings.of_parts(len(said), parts).told()


def _shown(reason: str) -> str:
    return reason[:REASON].encode("utf-8", "replace").decode()  # it may quote what is no text


def _reasons(said: Sequence[str]) -> dict[str, str]:
    return {str(rank): reason for rank, reason in enumerate(said) if reason}


def _verdict(reasons: Json) -> Verdict:
    return Verdict({int(rank): str(reason) for rank, reason in reasons.items()})


def _joined(head: Json, data: bytes) -> bytes:
    return canonical.dumps(head) + b"\n" + data


def _divided(raw: bytes) -> tuple[Json, bytes]:
    head, _, data = raw.partition(b"\n")
    return canonical.loads(head), data
