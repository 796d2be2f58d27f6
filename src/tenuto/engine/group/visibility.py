"""Whether a rank sees, in its own place, what another has just put: else they do not save in one place.

A directory of one name on every node passes for the same repository where it was copied from one node to the others: a
copy has its id, and every checkpoint. What is put from now on it has not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Final

from tenuto.concurrency.deadlines import Clock
from tenuto.errors import CorruptionError, ObjectNotFound
from tenuto.model.ids import CheckpointId
from tenuto.repo.format.object_names import begin_name
from tenuto.repo.ownership.claim import Attempt
from tenuto.repo.repository import Repo

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
