"""One round of a save: all ranks post, the coordinator collects and announces, all hear. And what ends a save in it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from tenuto.engine.save.handle import Save
from tenuto.errors import CorruptionError, ObjectNotFound, RanksDisagree, SaveFailed, ShardMismatch, TenutoError
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.ranks.contract import Clock
from tenuto.ranks.round import Round
from tenuto.repo.format.object_names import begin_name
from tenuto.repo.ownership.claim import Attempt
from tenuto.repo.repository import Repo

# --------------------------------------------------------------------------------------------------
# What ranks post to each other about a save: a word, a few values, and bytes.

REFUSED: Final = "refused"


@dataclass(frozen=True, slots=True)
class RankMessage:
    kind: str
    head: Mapping[str, Any]
    data: bytes

    def encode(self) -> bytes:
        return canonical_json.dumps({"kind": self.kind, **self.head}) + b"\n" + self.data


def read_message(raw: bytes, rank: int) -> RankMessage:
    """CorruptionError for what no rank of this version posts."""
    line, _, data = raw.partition(b"\n")
    head = canonical_json.loads(line)
    if not isinstance(head, dict) or not isinstance(kind := head.pop("kind", None), str):
        raise CorruptionError(f"rank {rank} has posted what this version does not understand", subject=f"rank {rank}")
    return RankMessage(kind, head, data)


def refusal(error: RanksDisagree | ShardMismatch, through: int) -> RankMessage:
    """What the coordinator announces where what the ranks hold, or mean to save, makes no save. `through`: the last
    step that one of them has come to."""
    kind = "ranks" if isinstance(error, RanksDisagree) else "state"
    told = {"error": kind, "message": error.message, "subject": error.subject or "", "hint": error.hint or ""}
    return RankMessage(REFUSED, {**told, "through": through}, b"")


def refused(post: RankMessage, phase: str) -> TenutoError:
    """The error of a refusal, the same on every rank."""
    message, subject, hint = (str(post.head[name]) for name in ("message", "subject", "hint"))
    if post.head["error"] == "state":
        return ShardMismatch(message, subject=subject or None, hint=hint or None)
    return RanksDisagree(message, subject=subject or None, hint=hint or None, phase=phase)


AGAIN: Final = "again"
STEP: Final = "the step that is saved"
SHOWN: Final = 8
"""So many ranks' values are told where they differ."""


class SaveRounds:
    """`forget`: the structure is to be planned anew at the next save."""

    def __init__(self, deadline_s: float, forget: Callable[[], None]) -> None:
        self._deadline_s = deadline_s
        self._forget = forget
        self.refused_through = -1
        """The last step that a rank had come to where the ranks were not at one. Who comes to it later fails it by
        himself: so all are at the same save again after it."""

    def posts(self, round: Round, save: Save) -> list[RankMessage]:
        """On the coordinator: of all ranks."""
        return [
            read_message(data, rank) for rank, data in enumerate(round.gather(self._deadline_s, phase(round, save)))
        ]

    def received(self, round: Round, save: Save) -> RankMessage:
        """What is announced of a save that goes on."""
        heard = read_message(round.receive(self._deadline_s, phase(round, save)), 0)
        if heard.kind == AGAIN:
            self._forget()
            raise SaveFailed(
                f"{save.id} was not saved: the structure of the state has changed on some ranks and not on others",
                subject=str(save.id),
                hint="the next save is planned anew; save at the same steps on all ranks",
            )
        if heard.kind == REFUSED:
            self.refused_through = max(self.refused_through, int(heard.head["through"]))
            raise refused(heard, f"the save of step {save.step}")
        return heard

    def alike(self, round: Round, posts: Sequence[RankMessage], kind: str) -> bool:
        """On the coordinator: whether all ranks are at the same step of the same save. If they are not, what follows is
        announced: that all must say anew what they hold, since some did not; or that they are at different steps."""
        steps = [int(post.head["step"]) for post in posts]
        if len(set(steps)) > 1:
            round.broadcast(refusal(disagreement(steps, STEP), max(steps)).encode())
            return False
        if any(post.kind != kind for post in posts):
            round.broadcast(RankMessage(AGAIN, {}, b"").encode())
            return False
        return True


def same(values: Sequence[Any], what: str) -> None:
    """RanksDisagree unless all ranks' values are one."""
    if len(set(values)) > 1:
        raise disagreement(values, what)


def disagreement(values: Sequence[Any], what: str) -> RanksDisagree:
    said = ", ".join(f"rank {rank}: {value}" for rank, value in list(enumerate(values))[:SHOWN])
    hint = "save at the same steps on all ranks" if what == STEP else None
    return RanksDisagree(f"the ranks do not agree about {what} ({said})", subject=what, hint=hint)


def phase(round: Round, save: Save) -> str:
    return f"{round.phase} (step {save.step})"


# --------------------------------------------------------------------------------------------------
# What each rank does, as steps between which other ranks can do theirs.
#
# A rank that waits for others yields first. In a job each rank simply goes on, and waits; a simulation of thousands of
# ranks takes their steps in turn, in one thread.

Result = TypeVar("Result")
WaitPoints = Generator[None, None, Result]


def through(steps: WaitPoints[Result]) -> Result:
    """All of them, one after the other: what comes of them."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Result = end.value
            return found


VISIBLE_S: Final = 30.0
"""At most so long what is there may stay unseen: a network file system remembers for a while that a name was absent."""
POLL_S: Final = 0.1
SHARE_ONE_PLACE: Final = "give a directory that all ranks share, by one path"
_TAIL_BYTES: Final = 4096


def awaited(look: Callable[[], bool], deadline_s: float, clock: Clock) -> bool:
    """Whether `look` finds what it looks for, now or some seconds later. `deadline_s`: for how long other ranks wait
    for this one."""
    until = clock.now() + min(VISIBLE_S, deadline_s / 4)
    while not look():
        if clock.now() >= until:
            return False
        clock.sleep(POLL_S)
    return True


def sees_claim(attempt: Attempt) -> bool:
    """Whether its claim is there, with the id that was drawn for it."""
    repo, run, number = attempt.repo, attempt.run, attempt.number
    if number not in repo.attempts(run):  # listed first: that makes a network file system look anew
        return False
    try:
        found = repo.find_attempt(run, number)
    except CorruptionError:
        return False
    return found is not None and found.id == attempt.id


def sees_begin(repo: Repo, id: CheckpointId, save_id: str) -> bool:
    """Of `begin.json`, which names what thousands of ranks may write, only the end is read: the save's id is there."""
    try:
        with closing(repo.store.open(begin_name(id))) as reader:
            tail = bytearray(min(reader.length, _TAIL_BYTES))
            reader.read_into(reader.length - len(tail), memoryview(tail))
    except ObjectNotFound:
        return False
    return b'"save_id":"%b"' % save_id.encode() in tail
