"""What of two trainings has to be equal: one that nobody interrupted, and one in several lives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from campaigns.resume_ranks.cases import SAMPLES, SAVE_EVERY, Case

Trail = Sequence[Mapping[str, Any]]


@dataclass
class Life:
    """What the ranks of one life have noted, by step; `began`: as each found things right after the restore."""

    world: int
    began: list[Mapping[str, Any]] = field(default_factory=list)
    steps: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)


def lives_of(trails: Sequence[Trail], worlds: Sequence[int]) -> list[Life]:
    """The trails of all ranks cut into lives."""
    found = [Life(world) for world in worlds]
    for rank, trail in enumerate(trails):
        lines = iter(trail)
        took_part = [number for number, world in enumerate(worlds) if rank < world]
        at = iter(took_part)
        life = found[next(at)] if took_part and took_part[0] == 0 else None
        for line in lines:
            if "life" in line:
                life = found[next(at)]
                life.began.append(line)
            elif life is not None:
                life.steps.setdefault(line["step"], []).append(line)
    return found


def drawn(noted: Sequence[Mapping[str, Any]]) -> list[int]:
    """The samples of one step in the order that the ranks share: each in turn."""
    batches = [line["indices"] for line in noted]
    return [batch[turn] for turn in range(max(map(len, batches))) for batch in batches if turn < len(batch)]


def order_of(steps: Mapping[int, list[int]]) -> dict[int, list[int]]:
    """Without what comes twice at an epoch's end, so that ranks have equally many."""
    found: dict[int, list[int]] = {}
    seen: set[int] = set()
    for step in sorted(steps):
        new = [index for index in dict.fromkeys(steps[step]) if index not in seen]
        found[step] = new if len(seen) + len(new) == SAMPLES else steps[step]
        seen = set() if len(seen) + len(new) == SAMPLES else seen | set(steps[step])
    return found


def differences(case: Case, whole: Life, lives: Sequence[Life]) -> Iterator[str]:
    """What is not as it has to be, in words; the first of it is what the rest follows from."""
    for before, after, end in zip(lives, lives[1:], case.ends, strict=False):
        yield from _restored(
            before, after, end.goes_on_from if end.how == "stopped" else end.step // SAVE_EVERY * SAVE_EVERY
        )
    yield from _in_order(whole, lives)
    yield from _streams(case, whole, lives)
    if case.same_ranks:
        yield from _bitwise(whole, lives)
    else:
        yield from _judge_certificate(case, lives)


def _restored(before: Life, after: Life, step: int) -> Iterator[str]:
    """The state is what the life before held at that step, every tensor as a whole, bit for bit."""
    if len(after.began) != after.world or {line["step"] for line in after.began} != {step}:
        yield f"the ranks resumed from steps {[line['step'] for line in after.began]}, and not from {step}"
        return
    left = before.steps[step][0]["digests"]
    for rank, line in enumerate(after.began):
        found = line["digests"]
        names = [name for name in left.keys() | found.keys() if left.get(name) != found.get(name)]
        if names or not found:
            yield f"rank {rank} of {after.world} began step {step} with another {min(names, default='nothing')}"


def _in_order(whole: Life, lives: Sequence[Life]) -> Iterator[str]:
    """Every step took the samples that the uninterrupted training took in it, in the order that ranks share."""
    taken = {step: drawn(noted) for life in lives for step, noted in life.steps.items()}
    wanted = order_of({step: drawn(noted) for step, noted in whole.steps.items()})
    found = order_of(taken)
    for step in sorted(wanted.keys() | found.keys()):
        if wanted.get(step) != found.get(step):
            yield f"step {step} took samples {found.get(step)}, and not {wanted.get(step)}"


def _streams(case: Case, whole: Life, lives: Sequence[Life]) -> Iterator[str]:
    """What was alike on all ranks is alike and as in the uninterrupted training; what was each rank's own is restored
    where the rank was there before, and like no other's where it is new."""
    for before, after in pairwise(lives):
        for rank, line in enumerate(after.began):
            names = line["marks"].keys()
            alike = {"python", *(names if case.streams == "alike" else ())}
            saved = before.steps.get(line["step"], [])
            for name in sorted(names):
                now, all_before = line["marks"][name], [one["marks"][name] for one in saved]
                is_own = name not in alike and len(saved) > 1
                source = all_before[rank : rank + 1] if is_own and rank < before.world else all_before[:1]
                if is_own and rank >= before.world:
                    others = [one["marks"][name] for one in after.began if one is not line]
                    if now in all_before + others:
                        yield f"rank {rank} is new and goes on with the {name} of another one"
                elif [now] != source:
                    yield f"rank {rank} of {after.world} began with another state of {name} than was saved"
    for life in lives:
        for step, noted in life.steps.items():
            if {line["marks"]["python"] for line in noted} != {whole.steps[step][0]["marks"]["python"]}:
                yield f"step {step} drew otherwise from the generator that is alike on all ranks"


def _bitwise(whole: Life, lives: Sequence[Life]) -> Iterator[str]:
    """On as many ranks every step of every rank is the same in every bit."""
    for life in lives:
        for step, noted in life.steps.items():
            for rank, (found, wanted) in enumerate(zip(noted, whole.steps[step], strict=True)):
                names = [name for name in wanted if found.get(name) != wanted[name]]
                if names:
                    yield f"step {step} of rank {rank} differs in {names[0]}"


def _judge_certificate(case: Case, lives: Sequence[Life]) -> Iterator[str]:
    """The certificate says what is not the same on another number of ranks."""
    for number, after in enumerate(lives[1:]):
        # What one process has given to all is alike on them from then on.
        own = case.streams == "of each rank" and min(case.worlds[: number + 1]) > 1
        for line in after.began:
            said, words = line["certificate"], f"and resumed by {after.world}"
            if said["exact"] or not any("sums over ranks" in one and words in one for one in said["reasons"]):
                yield "the certificate does not say that sums are added up in another order"
            if any("random generators (" in one for one in said["reasons"]) is not own:
                yield f"the certificate says of random streams: {said['reasons']}"
