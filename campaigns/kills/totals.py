"""Counts the kills of many rounds of a training with a memory tier: by phase and point, with the steps lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from campaigns.kills.rounds import Ending, Round
from tenuto.demo.processes import Life


@dataclass(frozen=True, slots=True)
class Killing:
    """One kill of the training.

    place: the phase it was in, by the process's own trace. point: the named one where it killed itself; None if the
        kill came from outside or from a timer.
    lost: steps that were done again.
    kept: whether a state of the run had been sealed in memory by then.
    behind: how many steps newer the newest sealed or written state is than the one that was resumed from.
    written: whether the latter was on its way to the store: the newer one's memory was then in use beside it.
    writing: whether a save to the store was under way.
    """

    run: str
    life: int
    place: str
    point: str | None
    lost: int
    kept: bool
    behind: int
    written: bool
    writing: bool


def killings(round: Round) -> list[Killing]:
    """Returns the kills of one round in their order, without those of flushes."""
    found: list[Killing] = []
    newest, kept = 0, False
    lives = round.outcome.lives
    for number, (life, ending) in enumerate(zip(lives, round.endings, strict=True)):
        if life.began is not None:
            newest = life.began
        newest = max(newest, life.durable, *life.sealed) if life.sealed else max(newest, life.durable)
        kept = kept or bool(life.sealed) or life.from_memory
        begins = [later.began for later in lives[number + 1 :] if later.began is not None]
        if life.killed:
            found.append(
                Killing(
                    round.run,
                    number,
                    place_of(life, ending),
                    ending.point,
                    round.outcome.lost_by(number),
                    kept,
                    # One that had resumed from nothing yet left what was there to the one after it.
                    max(newest - begins[0], 0) if begins and life.began is not None else 0,
                    bool(begins) and begins[0] == life.saved,
                    life.saving,
                )
            )
    return found


def place_of(life: Life, ending: Ending) -> str:
    """Returns the phase in which a life was killed."""
    if ending.place is not None:
        return ending.place
    if life.saving:
        return "write"
    return "starting" if life.reached == 0 else "between"


def counts(rounds: Sequence[Round]) -> dict[str, Any]:
    """Counts kills by place, by named point, and by the steps that each lost."""
    killed = [one for round in rounds for one in killings(round)]
    flushes = [flush for round in rounds for flush in round.flushes]
    dead = [flush for flush in flushes if flush.killed]
    kept = [one for one in killed if one.kept]
    points = [(one.place, one.point) for one in killed] + [("flush", flush.ending.point) for flush in dead]
    return {
        "kills_by_place": _ordered(
            Counter(one.place for one in killed)
            + Counter("flush" if one.ending.place == "flush" else "after a flush" for one in dead)
        ),
        "kills_at_named_points": {
            place: _ordered(Counter(point for at, point in points if at == place and point is not None))
            for place in sorted({at for at, point in points if point is not None})
        },
        "flushes": {
            "begun": len(flushes),
            "killed": len(dead),
            "killed_and_written": sum(flush.written for flush in dead),
            "ended_and_written": sum(flush.written for flush in flushes if not flush.killed),
            "ended_with_nothing_to_write": sum(not flush.written for flush in flushes if not flush.killed),
        },
        "steps_lost": {
            "after_the_first_sealed_state": _distribution(kept),
            "before_it": _distribution(one for one in killed if not one.kept),
            "by_place_after_it": {
                place: _distribution(one for one in kept if one.place == place)
                for place in sorted({one.place for one in kept})
            },
            "at_most_one_after_it": sum(one.lost <= 1 for one in kept),
            "more_than_one_after_it": sum(one.lost > 1 for one in kept),
            "more_than_one_while_writing_to_the_store": sum(
                one.lost > 1 and (one.writing or one.written) for one in kept
            ),
        },
        "not_from_the_newest_sealed_state": {
            "but_from_the_one_going_to_the_store": sum(one.behind > 0 and one.written for one in killed),
            "otherwise": [asdict(one) for one in killed if one.behind > 0 and not one.written],
        },
    }


def restarts(round: Round) -> dict[str, int]:
    """Compares what each process of a round resumed from with the same step of the untouched run, by content digest."""
    sealed = round.outcome.untouched.sealed
    began = [(life.from_memory, *life.restored) for life in round.outcome.lives if life.restored is not None]
    equal = sum(content == sealed.get(step) for _, step, content in began)
    memory = sum(from_memory for from_memory, _, _ in began)
    return {
        "restarts_from_memory": memory,
        "restarts_from_store": len(began) - memory,
        "restarts_equal": equal,
        "restarts_different": len(began) - equal,
    }


def _distribution(killed: Iterable[Killing]) -> dict[str, int]:
    found = Counter(one.lost for one in killed)
    return {str(lost): found[lost] for lost in sorted(found)}


def _ordered(found: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(found.items()))
