"""The rounds of a save: the messages of the ranks, the errors that end a save, and whether ranks see one store."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import Any, Final, TypeVar

from tenuto.concurrency.deadlines import Clock
from tenuto.engine.save.handle import Save
from tenuto.errors import CorruptionError, ObjectNotFound, RanksDisagree, SaveFailed, ShardMismatch, TenutoError
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.ranks.round import Round
from tenuto.record import record
from tenuto.repo.format.object_names import begin_name
from tenuto.repo.ownership.claim import Attempt
from tenuto.repo.repository import Repo

# --------------------------------------------------------------------------------------------------
# Messages about a save: a word, a few values, and bytes.

REFUSED: Final = "refused"


@record
class RankMessage:
    kind: str
    head: Mapping[str, Any]
    data: bytes

    def encode(self) -> bytes:
        return canonical_json.dumps({"kind": self.kind, **self.head}) + b"\n" + self.data


def read_message(raw: bytes, rank: int) -> RankMessage:
    """Decodes a message. Raises CorruptionError for what no rank of this version sends."""
    line, _, data = raw.partition(b"\n")
    head = canonical_json.loads(line)
    if not isinstance(head, dict) or not isinstance(kind := head.pop("kind", None), str):
        raise CorruptionError(f"rank {rank} has posted what this version does not understand", subject=f"rank {rank}")
    return RankMessage(kind, head, data)


def refusal(error: RanksDisagree | ShardMismatch, through: int) -> RankMessage:
    """Returns what the coordinator broadcasts where the states of the ranks make no save. `through`: the last step that
    one of them has reached."""
    head = {
        "error": "ranks" if isinstance(error, RanksDisagree) else "state",
        "message": error.message,
        "subject": error.subject or "",
        "hint": error.hint or "",
        "through": through,
    }
    return RankMessage(REFUSED, head, b"")


def refused(post: RankMessage, phase: str) -> TenutoError:
    """Returns the error of a refusal, the same on every rank."""
    message, subject, hint = (str(post.head[name]) for name in ("message", "subject", "hint"))
    if post.head["error"] == "state":
        return ShardMismatch(message, subject=subject or None, hint=hint or None)
    return RanksDisagree(message, subject=subject or None, hint=hint or None, phase=phase)


AGAIN: Final = "again"
STEP: Final = "the step that is saved"
SHOWN: Final = 8
"""How many ranks' values an error lists."""


class SaveRounds:
    def __init__(self, deadline_s: float, forget: Callable[[], None]) -> None:
        """`forget`: makes the next save plan the structure anew."""
        self._deadline_s = deadline_s
        self._forget = forget
        self.refused_through = -1
        """The last step that a rank had reached when the ranks disagreed. A rank that reaches it later fails that save
        by itself, so that all are at the same save again after it."""

    def posts(self, round: Round, save: Save) -> list[RankMessage]:
        """Returns the messages of all ranks, on the coordinator."""
        return [
            read_message(data, rank) for rank, data in enumerate(round.gather(self._deadline_s, phase(round, save)))
        ]

    def received(self, round: Round, save: Save) -> RankMessage:
        """Returns the coordinator's message. Raises the error, the same on all ranks, of a save that ends here."""
        message = read_message(round.receive(self._deadline_s, phase(round, save)), 0)
        if message.kind == AGAIN:
            self._forget()
            raise SaveFailed(
                f"{save.id} was not saved: the structure of the state has changed on some ranks and not on others",
                subject=str(save.id),
                hint="the next save is planned again; save at the same steps on all ranks",
            )
        if message.kind == REFUSED:
            self.refused_through = max(self.refused_through, int(message.head["through"]))
            raise refused(message, f"the save of step {save.step}")
        return message

    def alike(self, round: Round, posts: Sequence[RankMessage], kind: str) -> bool:
        """Returns, on the coordinator, whether all ranks are at the same step of the same save. If not, it broadcasts
        why: they are at different steps, or all must describe their states anew, since some did."""
        steps = [int(post.head["step"]) for post in posts]
        if len(set(steps)) > 1:
            round.broadcast(refusal(disagreement(steps, STEP), max(steps)).encode())
            return False
        if any(post.kind != kind for post in posts):
            round.broadcast(RankMessage(AGAIN, {}, b"").encode())
            return False
        return True


def same(values: Sequence[Any], what: str) -> None:
    """Raises RanksDisagree unless all ranks' values are equal."""
    if len(set(values)) > 1:
        raise disagreement(values, what)


def disagreement(values: Sequence[Any], what: str) -> RanksDisagree:
    shown = ", ".join(f"rank {rank}: {value}" for rank, value in list(enumerate(values))[:SHOWN])
    hint = "save at the same steps on all ranks" if what == STEP else None
    return RanksDisagree(f"the ranks do not agree about {what} ({shown})", subject=what, hint=hint)


def phase(round: Round, save: Save) -> str:
    return f"{round.phase} (step {save.step})"


# --------------------------------------------------------------------------------------------------
# The work of a rank as a generator that yields before each wait for others. In a job each rank simply continues, and
# waits; a simulation of thousands of ranks takes their steps in turn, in one thread.

Result = TypeVar("Result")
WaitPoints = Generator[None, None, Result]


def through(steps: WaitPoints[Result]) -> Result:
    """Takes all steps one after the other; returns their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Result = end.value
            return found


# --------------------------------------------------------------------------------------------------
# Whether a rank sees, in its own store, what another has just put: otherwise they do not save in one place.
#
# A directory that was copied from node to node under one name passes for the same repository: the copy has its id and
# every checkpoint. But what is put from now on it does not have.

VISIBLE_S: Final = 30.0
"""How long an object may stay unseen: a network file system remembers for a while that a name was absent."""
POLL_S: Final = 0.1
SHARE_ONE_PLACE: Final = "give a directory that all ranks share, by one path"
_TAIL_BYTES: Final = 4096


def becomes_visible(check: Callable[[], bool], deadline_s: float, clock: Clock) -> bool:
    """Returns whether `check` succeeds, now or some seconds later. `deadline_s`: how long other ranks wait for this
    one."""
    until = clock.now() + min(VISIBLE_S, deadline_s / 4)
    while not check():
        if clock.now() >= until:
            return False
        clock.sleep(POLL_S)
    return True


def sees_claim(attempt: Attempt) -> bool:
    """Returns whether the attempt's claim is there, with the id that was drawn for it."""
    repo, run, number = attempt.repo, attempt.run, attempt.number
    if number not in repo.attempts(run):  # listed first: that makes a network file system look anew
        return False
    try:
        found = repo.find_attempt(run, number)
    except CorruptionError:
        return False
    return found is not None and found.id == attempt.id


def sees_begin(repo: Repo, id: CheckpointId, save_id: str) -> bool:
    """Returns whether the save's `begin.json` is there. It names what thousands of ranks may write, so only its end is
    read, where the save's id is."""
    try:
        with closing(repo.store.open(begin_name(id))) as reader:
            tail = bytearray(min(reader.length, _TAIL_BYTES))
            reader.read_into(reader.length - len(tail), memoryview(tail))
    except ObjectNotFound:
        return False
    return b'"save_id":"%b"' % save_id.encode() in tail
