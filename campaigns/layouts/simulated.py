"""Ranks that are threads of this process, up to 64 of them: they save together as processes do, over a board in memory;
each restores its part by the code that processes restore by."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from campaigns.layouts.states import Made, Pair, make, wanted
from campaigns.layouts.truth import differences
from tenuto.engine.group.group_save import GroupCommit
from tenuto.engine.read.choose import CheckpointLeaves, fetch
from tenuto.engine.save.commit_protocol import SoloCommit
from tenuto.engine.save.job import ManifestDetails
from tenuto.engine.save.saver import Saver
from tenuto.events import Emitter
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Manifest
from tenuto.ranks.agreement import Agreement
from tenuto.ranks.contract import Settings
from tenuto.ranks.kv.in_process import InProcessKVStore, ThreadRanks
from tenuto.repo.ownership.claim import claim
from tenuto.repo.repository import Repo
from tenuto.state.contract import Prepared
from tenuto.state.encode.flattener import flatten
from tenuto.state.restore.match import match_state
from tenuto.store.memory import MemoryStore

DEADLINE_S: Final = 900.0
"""Dozens of ranks are threads of one process here, on whatever is left of one core: how long they take is not what is
looked at."""
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
    def match(manifest: Manifest, found: CheckpointLeaves) -> Prepared:
        return match_state(manifest.tree, found.private, found.specs, target.state, apart=of > 1)

    prepared, _ = fetch(repo, repo.manifest(id), match, rank=rank, of=of, emitter=Emitter())
    prepared.apply()


def save(repo: Repo, step: int, states: list[dict[str, Any]]) -> None:
    """The states of all ranks as one checkpoint, in an attempt of its own."""
    attempt = claim(repo, "main", CheckpointId("main", step - 1, step - 1) if step > 1 else None)

    def one(protocol: Any, rank: int) -> None:
        saver = Saver(repo, "main", lasting=False, protocol=protocol)
        saver.attempt = attempt
        try:
            saver.save(flatten(states[rank]), step, wait=True, about=ManifestDetails(progress={"step": step}))
        finally:
            saver.close()

    def in_group(agreement: Agreement) -> None:
        one(GroupCommit(repo, agreement, deadline_s=DEADLINE_S), agreement.rank)

    try:
        if len(states) == 1:
            one(SoloCommit(repo), 0)
        else:
            on_ranks(len(states), in_group)
    finally:
        attempt.release()


def on_ranks(count: int, work: Callable[[Agreement], None]) -> None:
    """Calls `work` on each of so many ranks at once; raises what the first that failed has raised."""
    kv_store, settings = InProcessKVStore(), Settings(beat_s=0.5, dead_after_s=60, answer_s=30)
    raised: list[BaseException | None] = [None] * count

    def run(rank: int) -> None:
        try:
            ranks = ThreadRanks(rank, count, kv_store)
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
