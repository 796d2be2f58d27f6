"""Lets one rank act at a time, the next one drawn from a seed, so that an interleaving can be repeated.

Ranks are threads here. Each yields before every call to the disk and to the ranks' key-value store, and when it sleeps.
A sleeping rank wakes when a key is put or, once no rank can act, when the clock advances.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar

from tenuto.concurrency.deadlines import Clock
from tenuto.testing.layers import Killed

R = TypeVar("R")
Kind = Literal["even", "preferred", "long"]
KINDS: Final[tuple[Kind, ...]] = ("even", "preferred", "long")
HANGS_S: Final = 120.0
"""Of real time: a recording takes well below a second."""
_CHANGE: Final = 0.03
_KEEP: Final = 0.92


class Stuck(RuntimeError):
    """Threads of a recording wait for each other. It is a fault of the campaign, says nothing about the program, and is
    never taken for a bug that was caught."""


@dataclass
class Background(Generic[R]):
    """Something that a rank has done in another thread of its own."""

    found: R | None = None
    error: BaseException | None = None
    over: bool = False


class Scheduler:
    """`kind`: every next rank is as likely as any other; one is preferred, until that changes; whoever acts goes on for
    long. `acts` is called with the number of whoever gets the turn, whenever somebody does."""

    def __init__(self, seed: object, kind: Kind, acts: Callable[[int], None]) -> None:
        self._chance = random.Random(f"turns {seed}")
        self._kind = kind
        self._acts = acts
        self._changed = threading.Condition()
        self._ready: set[int] = set()
        self._asleep: dict[int, tuple[float, int]] = {}
        """When each wakes by itself, and how far the board was when it fell asleep."""
        self._acting: int | None = None
        self._version = 0
        self._now = 0.0
        self._preference: dict[int, float] = {}
        self._own = threading.local()
        self._whose: dict[int, int] = {}
        """In whose name each thread beside acts."""
        self._beside: list[threading.Thread] = []
        self.raised: dict[int, BaseException] = {}
        self._stuck: Stuck | None = None

    def run(self, works: Mapping[int, Callable[[], None]]) -> None:
        """Returns when all have ended; what they raised is in `raised`. Being killed is no error. Raises Stuck,
        whatever the program has made of it."""
        threads = [
            threading.Thread(target=self._live, args=(actor, work), name=f"rank-{actor}", daemon=True)
            for actor, work in works.items()
        ]
        with self._changed:
            self._ready |= works.keys()
            for thread in threads:
                thread.start()
            self._pass_on()
        for thread in threads:
            thread.join(HANGS_S + 10)  # longer than a turn is waited for
            if thread.is_alive():
                raise Stuck(f"{thread.name} waits for something that is no turn")
        for thread in self._beside:
            thread.join(HANGS_S)
        if self._stuck is not None:
            raise self._stuck

    def in_background(self, work: Callable[[], R]) -> Background[R]:
        """Has it done in the name of whoever has the turn, who goes on meanwhile. Turns are passed among them all."""
        held: Background[R] = Background()
        with self._changed:
            acting, number = self.number, -1 - len(self._whose)
            self._whose[number] = self._whose.get(acting, acting)
            self._ready.add(number)
        thread = threading.Thread(target=self._help, args=(number, work, held), name=f"beside-{-number}", daemon=True)
        self._beside.append(thread)
        thread.start()
        return held

    def done(self, held: Background[R]) -> R:
        """What came of it, when it is over. Raises what it raised."""
        while not held.over:
            self.sleep(self.number, HANGS_S)
        if held.error is not None:
            raise held.error
        return held.found  # type: ignore[return-value]

    @property
    def number(self) -> int:
        """Of whoever has the turn. Another thread that a rank waits for acts as that rank."""
        acting = getattr(self._own, "number", self._acting)
        assert acting is not None, "somebody acts"
        return acting

    def _help(self, number: int, work: Callable[[], R], held: Background[R]) -> None:
        self._own.number = number
        with self._changed:
            self._await(number)
        try:
            held.found = work()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            held.error = error
        with self._changed:
            held.over = True
            self.posted()
            self._pass_on()

    def point(self, actor: int) -> None:
        """Others may come first."""
        actor = getattr(self._own, "number", actor)
        with self._changed:
            self._ready.add(actor)
            self._pass_on()
            self._await(actor)

    def sleep(self, actor: int, seconds: float) -> None:
        actor = getattr(self._own, "number", actor)
        with self._changed:
            self._asleep[actor] = (self._now + max(seconds, 1e-6), self._version)
            self._pass_on()
            self._await(actor)

    def posted(self) -> None:
        """Something on the board is new: whoever sleeps may look."""
        self._version += 1

    def clock(self, actor: int, slept: Callable[[], None]) -> Clock:
        """The clock of one rank; `slept` is called after each sleep, with the turn."""

        def sleep(seconds: float) -> None:
            self.sleep(actor, seconds)
            slept()

        return Clock(lambda: self._now, sleep)

    def _live(self, actor: int, work: Callable[[], None]) -> None:
        self._own.number = actor
        with self._changed:
            self._await(actor)
        try:
            work()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - told to whoever runs the turns
            self.raised[actor] = error
        finally:
            with self._changed:
                self._pass_on()

    def _await(self, actor: int) -> None:
        if not self._changed.wait_for(lambda: self._acting == actor, HANGS_S):
            self._stuck = Stuck(f"nobody gives up the turn that {actor} waits for")
            raise self._stuck
        self._acts(self._whose.get(actor, actor))

    def _pass_on(self) -> None:
        """With the lock held: somebody else's turn, or nobody's where all have ended."""
        if (
            not self._ready
            and not any(version < self._version for _, version in self._asleep.values())
            and self._asleep
        ):
            self._now = max(self._now, min(until for until, _ in self._asleep.values()))
        can = self._ready | {
            actor for actor, (until, version) in self._asleep.items() if until <= self._now or version < self._version
        }
        self._acting = self._chosen(sorted(can)) if can else None
        if self._acting is not None:
            self._ready.discard(self._acting)
            self._asleep.pop(self._acting, None)
        self._changed.notify_all()

    def _chosen(self, can: list[int]) -> int:
        last, chance = self._acting, self._chance.random()
        if self._kind == "long" and last in can and chance < _KEEP:
            return last
        if self._kind == "preferred":
            for actor in can:
                self._preference.setdefault(actor, self._chance.random())
            first = max(can, key=lambda actor: self._preference[actor])
            if chance < _CHANGE:
                self._preference[first] = self._chance.random() / 2
            return first
        return self._chance.choice(can)
