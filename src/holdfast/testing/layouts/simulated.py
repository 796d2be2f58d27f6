"""Ranks that are threads of this process, up to 64 of them: they save together as processes do, over a board in memory;
each restores its part by the code that processes restore by."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from holdfast.engine.job import About
from holdfast.engine.joint.party import Together
from holdfast.engine.party import Alone
from holdfast.engine.restore import Told, fetch
from holdfast.engine.save import Saver
from holdfast.events import Emitter
from holdfast.model.checkpoint import Manifest
from holdfast.model.names import CheckpointId
from holdfast.ranks.agreement import Agreement
from holdfast.ranks.memory import MemoryBoard, ThreadRanks
from holdfast.ranks.timing import Settings
from holdfast.repo.attempts import claim
from holdfast.repo.repository import Repo
from holdfast.state.contract import Prepared
from holdfast.state.flattener import flatten
from holdfast.state.prepare import prepare
from holdfast.store.backends.memory import MemoryStore
from holdfast.testing.layouts.states import Made, Pair, make, wanted
from holdfast.testing.layouts.truth import differences

DEADLINE_S: Final = 120.0
WORLDS: Final = (*(2, 3, 4, 5, 6, 7, 8, 9) * 3, 1, 1, 12, 12, 16, 16, 24, 32, 64)
"""Large ones are rare: their threads wait for one interpreter."""


def store_of(pair: Pair) -> MemoryStore:
    """A place of its own for the checkpoints of one pair."""
    store = MemoryStore(f"layouts-{pair.seed}-{pair.number}")
    store.place.objects.clear()
    return store


def run_phase(pair: Pair, phase: int, repo: Repo) -> list[str]:
    """As a Task of `processes`: saves side 0, or restores what was saved last as the other side and saves that."""
    side = phase % 2
    world, told, states = pair.worlds[side], [], []
    for rank in range(world):
        truth = make(pair, side, pair.truth, rank)
        if phase:
            target = make(pair, side, pair.other, rank)
            before = {path: value.copy() if pair.arrays and hasattr(value, "copy") else value.clone()
                      for path, value in target.read().items()}  # fmt: skip
            restore(repo, CheckpointId("main", phase, phase), target, rank, world)
            wrong = differences(target.read(), wanted(pair, side, rank, truth.read(), before))
            told += [f"rank {rank}: {one}" for one in wrong]
            truth = target
        states.append(truth.state)
    if not told:
        save(repo, phase + 1, states)
    return told


def restore(repo: Repo, id: CheckpointId, target: Made, rank: int, of: int) -> None:
    def match(manifest: Manifest, found: Told) -> Prepared:
        return prepare(manifest.tree, found.private, found.specs, target.state, apart=of > 1)

    prepared, _ = fetch(repo, repo.manifest(id), match, rank=rank, of=of, emitter=Emitter())
    prepared.apply()


def save(repo: Repo, step: int, states: list[dict[str, Any]]) -> None:
    """The states of all ranks as one checkpoint, in an attempt of its own."""
    attempt = claim(repo, "main", CheckpointId("main", step - 1, step - 1) if step > 1 else None)

    def one(party: Any, rank: int) -> None:
        saver = Saver(repo, "main", lasting=False, party=party)
        saver.attempt = attempt
        try:
            saver.save(flatten(states[rank]), step, wait=True, about=About(progress={"step": step}))
        finally:
            saver.close()

    def together(agreement: Agreement) -> None:
        one(Together(repo, agreement, deadline_s=DEADLINE_S), agreement.rank)

    try:
        if len(states) == 1:
            one(Alone(repo), 0)
        else:
            on_ranks(len(states), together)
    finally:
        attempt.release()


def on_ranks(count: int, work: Callable[[Agreement], None]) -> None:
    """Calls `work` on each of so many ranks at once; raises what the first that failed has raised."""
    board, settings = MemoryBoard(), Settings(beat_s=0.5, dead_after_s=60, answer_s=30)
    raised: list[BaseException | None] = [None] * count

    def run(rank: int) -> None:
        try:
            ranks = ThreadRanks(rank, count, board)
            with Agreement.open(ranks, {"run": "main"}, DEADLINE_S, settings) as agreement:
                work(agreement)
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread that asked
            raised[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in raised:
        if error is not None:
            raise error
