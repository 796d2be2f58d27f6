"""A budget: of what a policy keeps, the least worth goes until the rest fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from tenuto.errors import UsageError
from tenuto.model.ids import CheckpointId, attempt_key
from tenuto.model.sizes import parse_bytes
from tenuto.policy.keep import Best, CheckpointFacts, KeepPolicy, Latest, Opinion, protections
from tenuto.policy.numbers import duration
from tenuto.record import record
from tenuto.units import size

_SHOWN: Final = 5
"""Checkpoints that a warning names."""


@record
class Budget:
    """nbytes: what data files may take. words: the same as it was given."""

    nbytes: int
    words: str
    written: str
    """As an argument of `keep.limit`."""


def budget_of(nbytes: int | str | None, cost: float | None, per_gib_month: float | None) -> Budget:
    """Returns the budget that the arguments of `keep.limit` give. Raises UsageError for none and for two."""
    hint = 'keep.limit(policy, bytes="2TB"), or keep.limit(policy, cost=100, per_gib_month=0.023)'
    if nbytes is not None:
        if cost is not None or per_gib_month is not None:
            raise UsageError("keep.limit has two budgets: bytes and a cost", hint=hint)
        found = parse_bytes(nbytes, "bytes")
        return Budget(found, size(found), f"bytes={nbytes!r}")
    if cost is None or per_gib_month is None:
        missing = "no budget" if cost is per_gib_month else "a cost and no price" if cost else "a price and no cost"
        raise UsageError(f"keep.limit has {missing}", hint=hint)
    money, price = duration(cost, "keep.limit(cost={})"), duration(per_gib_month, "keep.limit(per_gib_month={})")
    most = int(money / price * (1 << 30))
    return Budget(most, f"{money:g} a month ({size(most)})", f"cost={money:g}, per_gib_month={price:g}")


@record
class Limit(KeepPolicy):
    """Keeps what `inner` keeps, as far as it fits into the budget together with what is never removed."""

    inner: KeepPolicy
    budget: Budget

    def judge(self, history: Sequence[CheckpointFacts]) -> list[Opinion]:
        opinions = self.inner.judge(history)
        protected = protections(history)
        pairs = list(zip(history, opinions, strict=True))
        kept = [facts for facts, opinion in pairs if opinion.keep or protected[facts.id]]
        taken = _Taken(history, kept)
        worth = self._worth(history)
        frees_nothing = {id for facts in kept if protected[facts.id] for id in (facts.id, *facts.bases)}
        going: set[CheckpointId] = set()
        for facts in sorted(kept, key=lambda facts: worth[facts.id]):
            if taken.nbytes <= self.budget.nbytes:
                break
            if facts.id not in frees_nothing:
                going.add(facts.id)
                taken.drop(facts)
        over = Opinion(False, f"beyond the budget of {self.budget.words}")
        return [over if facts.id in going else opinion for facts, opinion in pairs]

    def _worth(self, history: Sequence[CheckpointFacts]) -> dict[CheckpointId, tuple[int, int, tuple[int, int]]]:
        """Returns a key for each checkpoint, the least worth lowest: milestones and ages, then what is kept as one of
        the newest, then as one of the best; the older first, and of the best the worse."""
        best: dict[CheckpointId, int] = {}
        newest: set[CheckpointId] = set()
        for part in self.inner.parts():
            if not isinstance(part, (Best, Latest)):
                continue
            places = (
                {facts.id: place for place, facts in enumerate(part.ranked(history))} if isinstance(part, Best) else {}
            )
            for facts, opinion in zip(history, part.judge(history), strict=True):
                if opinion.keep and facts.id in places:
                    best[facts.id] = min(places[facts.id], best.get(facts.id, len(history)))
                elif opinion.keep:
                    newest.add(facts.id)
        return {
            facts.id: (
                2 if facts.id in best else 1 if facts.id in newest else 0,
                -best.get(facts.id, 0),
                facts.age_key,
            )
            for facts in history
        }

    def warnings(self, history: Sequence[CheckpointFacts]) -> list[str]:
        protected = protections(history)
        staying = [facts for facts in history if protected[facts.id]]
        taken = _Taken(history, staying).nbytes
        found = self.inner.warnings(history)
        if taken <= self.budget.nbytes:
            return found
        shown = [
            f"{attempt_key(facts.id.attempt)}/{facts.id.step} ({', '.join(protected[facts.id])})"
            for facts in staying[:_SHOWN]
        ]
        more = f" and {len(staying) - _SHOWN:,} more" if len(staying) > _SHOWN else ""
        why = f"what may not go takes {size(taken)}: {', '.join(shown)}{more}"
        return [*found, f"the budget of {self.budget.words} is not met, since {why}"]

    def metrics(self) -> frozenset[str]:
        return self.inner.metrics()

    def parts(self) -> tuple[KeepPolicy, ...]:
        return self.inner.parts()

    def __repr__(self) -> str:
        return f"keep.limit({self.inner!r}, {self.budget.written})"


class _Taken:
    """The bytes of what is kept: its own data files, and those of others in which some of its bytes lie."""

    def __init__(self, history: Sequence[CheckpointFacts], kept: Sequence[CheckpointFacts]) -> None:
        self._bytes = {facts.id: facts.bytes for facts in history}
        self._needs = Counter(id for facts in kept for id in {facts.id, *facts.bases})
        self.nbytes = sum(self._bytes.get(id, 0) for id in self._needs)

    def drop(self, facts: CheckpointFacts) -> None:
        for id in {facts.id, *facts.bases}:
            self._needs[id] -= 1
            if not self._needs[id]:
                self.nbytes -= self._bytes.get(id, 0)
