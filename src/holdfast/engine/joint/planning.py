"""The plan for a structure that is new: what the ranks say of it, and what each is told.

Every rank says which boxes it holds, and the digest of its tree. Thousands of ranks nearly always have one and the same
tree, the coordinator's own; of further ones the coordinator asks one rank each. What it announces is the same few words
for all; who writes what, each rank reads for itself alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from holdfast.crashpoints import crashpoint
from holdfast.engine.handle import Save
from holdfast.engine.joint.messages import Post, refusal
from holdfast.engine.joint.rounds import Rounds
from holdfast.engine.joint.sharing import JointPlan, Share, plan_together
from holdfast.engine.joint.steps import Steps
from holdfast.engine.joint.structure import Said, describe, understand
from holdfast.errors import RanksDisagree, ShardMismatch
from holdfast.model import canonical
from holdfast.model.checkpoint import Json
from holdfast.plan.assign import Strategy
from holdfast.ranks.agreement import Agreement
from holdfast.ranks.topic import Topic
from holdfast.state.contract import Flattened

NEW, TREES, TREE, PLAN = "new", "trees", "tree", "plan"
PLANNING: Final = "planning who writes what"


class Planning:
    """`plan`: on the coordinator, of the structure that was planned last."""

    def __init__(self, agreement: Agreement, rounds: Rounds, strategy: Strategy, chunk_bytes: int) -> None:
        self._agreement = agreement
        self._rounds = rounds
        self._strategy: Strategy = strategy
        self._chunk_bytes = chunk_bytes
        self._said: list[Said] = []
        self.plan: JointPlan | None = None

    def take(self, topic: Topic, flattened: Flattened, save: Save) -> Steps[Share]:
        """This rank's part of the plan. Raises RankFailed, RanksMissing, RanksDisagree and ShardMismatch."""
        spelled = canonical.dumps(flattened.tree)
        with topic:
            topic.post(Post(NEW, {"step": save.step}, describe(flattened, spelled)).encode())
            crashpoint("structure told, plan not yet heard")
            yield
            if self._agreement.is_coordinator:
                self._learn(topic, flattened, save)
            heard = self._rounds.heard(topic, save)
            answer = topic.answer() if heard.kind == PLAN else b""
        if heard.kind == TREES:
            asked = self._agreement.rank in heard.head["ranks"]
            with self._agreement.topic("save") as second:
                second.post(Post(TREE, {"step": save.step}, spelled if asked else b"").encode())
                yield
                if self._agreement.is_coordinator:
                    self._learn_trees(second, flattened, save)
                heard = self._rounds.heard(second, save)
                answer = second.answer()
        return Share(heard.head, answer, flattened, self._agreement.rank)

    def _learn(self, topic: Topic, flattened: Flattened, save: Save) -> None:
        """On the coordinator: what all ranks hold; the plan, or whose trees are asked for."""
        posts = self._rounds.posts(topic, save)
        if not self._rounds.alike(topic, posts, NEW):
            return
        try:
            self._said = [understand(post.data, rank) for rank, post in enumerate(posts)]
        except ShardMismatch as error:
            topic.announce(refusal(error, save.step).encode())
            return
        others = first_of_each([one.digest for one in self._said])[1:]
        if others:
            topic.announce(Post(TREES, {"ranks": others}, b"").encode())
        else:
            self._announce(topic, save, {self._said[0].digest: flattened.tree})

    def _learn_trees(self, topic: Topic, flattened: Flattened, save: Save) -> None:
        posts = self._rounds.posts(topic, save)
        if self._rounds.alike(topic, posts, TREE):
            trees = {self._said[0].digest: flattened.tree}
            trees |= {one.digest: canonical.loads(post.data)
                      for one, post in zip(self._said, posts, strict=True) if post.data}  # fmt: skip
            self._announce(topic, save, trees)

    def _announce(self, topic: Topic, save: Save, trees: dict[str, Json]) -> None:
        said, self._said = self._said, []
        try:
            plan, shares = plan_together(said, trees, strategy=self._strategy, chunk_bytes=self._chunk_bytes)
        except (RanksDisagree, ShardMismatch) as error:
            topic.announce(refusal(error, save.step).encode())
            return
        self.plan = plan
        topic.announce(Post(PLAN, plan.told, b"").encode(), shares)


def first_of_each(marks: Sequence[str]) -> list[int]:
    """The lowest rank of each different mark, ascending."""
    found: dict[str, int] = {}
    for rank, mark in enumerate(marks):
        found.setdefault(mark, rank)
    return list(found.values())
