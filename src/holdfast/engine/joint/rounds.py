"""One round of a save: all ranks post, the coordinator collects and announces, all hear. And what ends a save in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from holdfast.engine.handle import Save
from holdfast.engine.joint.messages import REFUSED, Post, read_post, refusal, refused
from holdfast.errors import RanksDisagree, SaveFailed
from holdfast.ranks.topic import Topic

AGAIN: Final = "again"
STEP: Final = "the step that is saved"
SHOWN: Final = 8
"""So many ranks' values are told where they differ."""


class Rounds:
    """`forget`: the structure is to be planned anew at the next save."""

    def __init__(self, deadline_s: float, forget: Callable[[], None]) -> None:
        self._deadline_s = deadline_s
        self._forget = forget
        self.refused_through = -1
        """The last step that a rank had come to where the ranks were not at one. Who comes to it later fails it by
        himself: so all are at the same save again after it."""

    def posts(self, topic: Topic, save: Save) -> list[Post]:
        """On the coordinator: of all ranks."""
        return [read_post(data, rank) for rank, data in enumerate(topic.collect(self._deadline_s, phase(topic, save)))]

    def heard(self, topic: Topic, save: Save) -> Post:
        """What is announced of a save that goes on."""
        heard = read_post(topic.hear(self._deadline_s, phase(topic, save)), 0)
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

    def alike(self, topic: Topic, posts: Sequence[Post], kind: str) -> bool:
        """On the coordinator: whether all ranks are at the same step of the same save. If they are not, what follows is
        announced: that all must say anew what they hold, since some did not; or that they are at different steps."""
        steps = [int(post.head["step"]) for post in posts]
        if len(set(steps)) > 1:
            topic.announce(refusal(disagreement(steps, STEP), max(steps)).encode())
            return False
        if any(post.kind != kind for post in posts):
            topic.announce(Post(AGAIN, {}, b"").encode())
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


def phase(topic: Topic, save: Save) -> str:
    return f"{topic.phase} (step {save.step})"
