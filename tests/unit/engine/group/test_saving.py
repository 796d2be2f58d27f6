"""Several ranks save one state, and any number of ranks reads it: bit for bit, or an error that names who differs."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tenuto
from support.rank_threads import on_ranks, outcomes
from tenuto.engine.group import rounds
from tenuto.engine.group.group_save import GroupCommit
from tenuto.engine.read import sharded_reader
from tenuto.engine.read.sharded_reader import ShardedReader
from tenuto.engine.save.handle import Save
from tenuto.engine.save.job import ManifestDetails
from tenuto.engine.save.saver import Saver
from tenuto.errors import RanksDisagree, SaveFailed, ShardMismatch
from tenuto.events import Emitter
from tenuto.model.ids import CheckpointId
from tenuto.ranks.agreement import Agreement
from tenuto.repo.commit import begin
from tenuto.repo.ownership.claim import claim, joined
from tenuto.repo.repository import Repo
from tenuto.state.encode.flattener import Flattener, flatten
from tenuto.state.restore.match import match_state
from tenuto.store.memory import MemoryStore

ROWS, WIDTH = 1200, 300


def whole() -> dict[str, Any]:
    rng = np.random.default_rng(7)
    return {
        "w": rng.standard_normal((ROWS, WIDTH)).astype(np.float32),
        "c": rng.standard_normal((WIDTH, 64)),
        "r": rng.standard_normal((2000, 333)).astype(np.float32),
        "small": np.arange(5.0),
        "step": 3,
        "epoch": {"lr": 0.5},
    }


def part(rank: int, of: int) -> dict[str, Any]:
    """What one rank holds: rows of `w`, unevenly; columns of `c`; the rest as all of it."""
    state = whole()
    rows = np.linspace(0, ROWS, of + 1).astype(int) + np.array([0, *[7] * (of - 1), 0])
    begin, end = int(rows[rank]), int(rows[rank + 1])
    columns = np.linspace(0, 64, of + 1).astype(int)
    left, right = int(columns[rank]), int(columns[rank + 1])
    return {
        **state,
        "w": tenuto.shard(state["w"][begin:end].copy(), whole=(ROWS, WIDTH), offsets=(begin, 0)),
        "c": tenuto.shard(state["c"][:, left:right].copy(), whole=(WIDTH, 64), offsets=(0, left)),
        "r": tenuto.replicated(state["r"]),
    }


def save_with(repo: Repo, attempt: Any, state: Callable[[int, int], Any], steps: int = 1) -> Callable[..., list[Save]]:
    def work(agreement: Agreement) -> list[Save]:
        saver = Saver(repo, "main", lasting=False, protocol=GroupCommit(repo, agreement, deadline_s=60))
        saver.attempt = attempt
        taken = []
        for step in range(1, steps + 1):
            flattened = Flattener(
                state(agreement.rank, agreement.world_size), private={"mine": agreement.rank}
            ).flatten()
            taken.append(saver.save(flattened, step, wait=True, about=ManifestDetails()))
        for save in taken:
            save.wait(60)
        saver.close()
        return taken

    return work


@pytest.fixture
def repo() -> Repo:
    return Repo.create_or_open(MemoryStore("joint"))


@pytest.fixture
def attempt(repo: Repo) -> Any:
    attempt = claim(repo, "main", None)
    yield attempt
    attempt.release()


def read_as(repo: Repo, save: Save, into: Any, rank: int | None) -> tuple[Any, Any]:
    manifest = repo.manifest(save.id)
    found = ShardedReader(repo, manifest, rank, Emitter())
    prepared = match_state(manifest.tree, found.full.private, found.full.specs, into)
    found.read(prepared)
    return prepared.apply(), found.full.private


def empty(state: Any) -> Any:
    return {name: np.zeros_like(value) if isinstance(value, np.ndarray) else 0 for name, value in state.items()}


@pytest.mark.parametrize("count", [2, 3, 5])
def test_what_several_ranks_save_one_process_reads_as_a_whole(repo: Repo, attempt: Any, count: int) -> None:
    saves = on_ranks(count, save_with(repo, attempt, part, steps=2))
    assert all(save.committed for each in saves for save in each)
    for step in (0, 1):
        assert len({each[step].save_id for each in saves}) == 1
        restored, private = read_as(repo, saves[0][step], None, None)
        assert private is None
        for name, value in whole().items():
            assert np.array_equal(restored[name], value), name


@pytest.mark.parametrize(("count", "readers"), [(3, 2), (2, 5), (4, 4), (1, 3), (4, 1)])
def test_any_number_of_ranks_reads_it(repo: Repo, attempt: Any, count: int, readers: int) -> None:
    save = on_ranks(count, save_with(repo, attempt, part))[0][0]
    for rank in range(readers):
        into = part(rank, readers)
        wanted = part(rank, readers)
        for name in ("w", "c", "r"):
            into[name].value[...] = 0
        read_as(repo, save, into, rank if readers == count else None)
        for name in ("w", "c", "r"):
            assert np.array_equal(into[name].value, wanted[name].value), (rank, name)


def test_a_part_is_cut_out_in_pieces_also_where_its_first_axis_has_one_item(
    repo: Repo, attempt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = np.arange(64 * 96, dtype=np.float32).reshape(1, 64, 96)

    def state(rank: int, of: int) -> dict[str, Any]:
        return {"experts": tenuto.shard(stack[:, :, rank * 48 : rank * 48 + 48].copy(), dim=2, rank=rank, of=of)}

    save = on_ranks(2, save_with(repo, attempt, state))[0][0]
    pieces: list[int] = []
    whole_read = sharded_reader.LazyReader.read_items

    def read(self: Any, row: int, path: str, region: Any, target: Any) -> None:
        pieces.append(target.nbytes)
        whole_read(self, row, path, region, target)

    monkeypatch.setattr(sharded_reader, "PIECE_BYTES", 1024)
    monkeypatch.setattr(sharded_reader.LazyReader, "read_items", read)
    restored, _ = read_as(repo, save, None, None)
    assert np.array_equal(restored["experts"], stack)
    assert max(pieces) <= 1024


def test_each_box_is_written_once_and_evenly(repo: Repo, attempt: Any) -> None:
    save = on_ranks(4, save_with(repo, attempt, part))[0][0]
    manifest = repo.manifest(save.id)
    nbytes = [sum(pack.length for pack in repo.packs(manifest, rank)) for rank in range(4)]
    state = whole()
    held = sum(value.nbytes for value in state.values() if isinstance(value, np.ndarray))
    assert held < sum(nbytes) < held + 4 * 8192
    assert max(nbytes) < 1.15 * held / 4


def test_what_belongs_to_each_rank_comes_back_to_it(repo: Repo, attempt: Any) -> None:
    def own(rank: int, of: int) -> dict[str, Any]:
        return {**part(rank, of), "seed": tenuto.per_rank(np.full(3, rank))}

    save = on_ranks(3, save_with(repo, attempt, own))[0][0]
    for rank in range(3):
        into = {**part(rank, 3), "seed": tenuto.per_rank(np.zeros(3, int))}
        read_as(repo, save, into, rank)
        assert into["seed"].value.tolist() == [rank] * 3


def differing(repo: Repo, attempt: Any, state: Callable[[int, int], Any], count: int = 3) -> list[Any]:
    found = outcomes(count, save_with(repo, attempt, state))
    assert list(repo.committed("main", attempt.number)) == []
    return list(found)


def test_replicas_that_differ_are_refused_by_path_and_rank(repo: Repo, attempt: Any) -> None:
    def state(rank: int, of: int) -> dict[str, Any]:
        found = part(rank, of)
        found["small"] = found["small"] + (rank == 1)
        return found

    found = differing(repo, attempt, state)
    assert all(isinstance(one, SaveFailed) for one in found)
    assert all("small is not the same on rank 1 as on ranks 0 and 2" in str(one) for one in found)


def test_plain_values_that_differ_are_refused_by_path(repo: Repo, attempt: Any) -> None:
    found = differing(repo, attempt, lambda rank, of: {**part(rank, of), "epoch": {"lr": 0.5 + (rank == 2)}})
    assert all("epoch/lr" in str(one) and "rank 2" in str(one) for one in found)


def test_a_hole_is_refused_before_anything_is_written(repo: Repo, attempt: Any) -> None:
    def state(rank: int, of: int) -> dict[str, Any]:
        found = part(rank, of)
        if rank == 1:
            found["w"] = tenuto.shard(found["w"].value[1:], whole=(ROWS, WIDTH), offsets=(408, 0))
        return found

    found = differing(repo, attempt, state)
    assert all(isinstance(one, ShardMismatch) and "w" in str(one) and "is missing" in str(one) for one in found)


def test_ranks_that_save_different_steps_are_told(repo: Repo, attempt: Any) -> None:
    def work(agreement: Agreement) -> None:
        saver = Saver(repo, "main", lasting=False, protocol=GroupCommit(repo, agreement, deadline_s=60))
        saver.attempt = attempt
        state = flatten(part(agreement.rank, agreement.world_size))
        saver.save(state, 1, wait=True, about=ManifestDetails()).wait(60)
        saver.save(state, 2 + (agreement.rank == 1), wait=True, about=ManifestDetails()).wait(60)

    found = outcomes(3, work)
    assert isinstance(found[0], SaveFailed) and isinstance(found[0].__cause__, RanksDisagree)
    assert all("the step that is saved (rank 0: 2, rank 1: 3, rank 2: 2)" in str(one) for one in found)
    assert [id.step for id in repo_committed(repo, attempt)] == [1]


def test_ranks_that_save_for_different_attempts_are_told_and_nothing_is_begun(repo: Repo, attempt: Any) -> None:
    """One that has not heard of a claim: what it would write belongs to another attempt."""
    other = joined(repo, replace(attempt.record, id="0" * 32))

    def work(agreement: Agreement) -> tuple[BaseException | None, bool]:
        saver = Saver(repo, "main", lasting=False, protocol=GroupCommit(repo, agreement, deadline_s=60))
        state = flatten(part(agreement.rank, agreement.world_size))
        saver.attempt = other if agreement.rank == 1 else attempt
        first = saver.save(state, 1, wait=False, about=ManifestDetails())
        assert first.join(60)
        saver.attempt = attempt
        second = saver.save(state, 2, wait=True, about=ManifestDetails())
        second.wait(60)
        saver.close()
        return first.error, second.committed

    for error, committed in on_ranks(2, work):
        assert isinstance(error, SaveFailed) and isinstance(error.__cause__, RanksDisagree)
        assert f"about the attempt (rank 0: {attempt.id}, rank 1: {'0' * 32})" in str(error)
        assert committed, "the next save is one of all again"
    assert [id.step for id in repo_committed(repo, attempt)] == [2]
    assert repo.steps("main", attempt.number) == [2]


def test_a_rank_that_does_not_see_a_save_begun_puts_nothing(
    repo: Repo, attempt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks into a copy, where nobody would ever remove what it puts. Also a directory of that step is no sign."""
    monkeypatch.setattr(rounds, "VISIBLE_S", 0.2)
    copy = MemoryStore("joint, copied")
    copy.place.objects.clear()
    copy.place.objects.update(repo.store.place.objects)  # type: ignore[attr-defined]
    elsewhere = Repo.open(copy)
    begin(joined(elsewhere, attempt.record), 1, "0" * 32, ["rank-00001.safetensors"])
    before = dict(copy.place.objects)

    def work(agreement: Agreement) -> None:
        mine = elsewhere if agreement.rank == 1 else repo
        saver = Saver(mine, "main", lasting=False, protocol=GroupCommit(mine, agreement, deadline_s=60))
        saver.attempt = attempt if agreement.is_coordinator else joined(mine, attempt.record)
        saver.save(flatten(part(agreement.rank, agreement.world_size)), 1, wait=True, about=ManifestDetails()).wait(60)

    for error in outcomes(3, work):
        assert isinstance(error, SaveFailed), error
        assert f"rank 1 does not find it begun in memory://joint, copied on {socket.gethostname()}" in str(error)
    assert copy.place.objects == before
    assert list(repo.committed("main", attempt.number)) == []
    left = repo.store.walk(CheckpointId("main", attempt.number, 1).directory)
    assert {entry.name.rpartition("/")[2] for entry in left} == {"begin.json", "manifest.json"}


def repo_committed(repo: Repo, attempt: Any) -> list[Any]:
    return [CheckpointId("main", attempt.number, step) for step in repo.committed("main", attempt.number)]


def test_a_structure_that_changes_on_all_ranks_is_planned_anew(repo: Repo, attempt: Any) -> None:
    def work(agreement: Agreement) -> list[Save]:
        saver = Saver(repo, "main", lasting=False, protocol=GroupCommit(repo, agreement, deadline_s=60))
        saver.attempt = attempt
        state = part(agreement.rank, agreement.world_size)
        first = saver.save(flatten(state), 1, wait=True, about=ManifestDetails())
        state["more"] = np.arange(9)
        second = saver.save(flatten(state), 2, wait=True, about=ManifestDetails())
        return [first, second]

    saves = on_ranks(2, work)
    assert all(save.committed for each in saves for save in each)
    assert read_as(repo, saves[0][1], None, None)[0]["more"].tolist() == list(range(9))


def test_a_structure_that_changes_behind_a_save_in_flight_does_not_concern_it(repo: Repo, attempt: Any) -> None:
    planned = threading.Barrier(2, timeout=60)

    def work(agreement: Agreement) -> list[Save]:
        protocol = GroupCommit(repo, agreement, deadline_s=60)
        saver = Saver(repo, "main", lasting=False, in_flight=2, protocol=protocol)
        saver.attempt = attempt
        begin, first_is_written = protocol.begin, threading.Event()

        def held(job: Any, attempt: Any) -> None:
            if job.save.step == 1:
                assert first_is_written.wait(60)
            begin(job, attempt)

        protocol.begin = held  # type: ignore[method-assign]
        state = part(agreement.rank, agreement.world_size)
        first = saver.save(flatten(state), 1, wait=False, about=ManifestDetails())
        state["more"] = np.arange(9)
        second = saver.save(flatten(state), 2, wait=False, about=ManifestDetails())
        planned.wait()  # the second is planned on both ranks before the first begins
        first_is_written.set()
        first.wait(60)
        second.wait(60)
        return [first, second]

    saves = on_ranks(2, work)
    assert "more" not in read_as(repo, saves[0][0], None, None)[0]
    assert read_as(repo, saves[0][1], None, None)[0]["more"].tolist() == list(range(9))


def test_a_structure_that_changes_on_one_rank_loses_one_save_and_no_more(repo: Repo, attempt: Any) -> None:
    def work(agreement: Agreement) -> list[bool]:
        saver = Saver(repo, "main", lasting=False, protocol=GroupCommit(repo, agreement, deadline_s=60))
        saver.attempt = attempt
        state = {**part(agreement.rank, agreement.world_size), "own": tenuto.per_rank({})}
        committed = []
        for step in (1, 2, 3):
            if step == 2 and agreement.rank == 1:
                state["own"].value["seen"] = np.ones(3)
            try:
                saver.save(flatten(state), step, wait=True, about=ManifestDetails()).wait(60)
                committed.append(True)
            except SaveFailed as error:
                assert "planned again" in str(error)
                committed.append(False)
        return committed

    assert on_ranks(3, work) == [[True, False, True]] * 3


def test_what_one_rank_met_first_is_why_the_save_failed_on_all(repo: Repo, attempt: Any) -> None:
    """The others' objects are freed under their hands then: what they meet of that says less."""
    told = threading.Barrier(2, timeout=60)

    def work(agreement: Agreement) -> str:
        protocol = GroupCommit(repo, agreement, deadline_s=60)
        flattened = flatten(part(agreement.rank, agreement.world_size))
        save = Save(CheckpointId("main", attempt.number, 1), "")
        protocol.take(flattened, save)
        if agreement.rank == 1:
            told.wait()
        cause = protocol.failed(save, OSError("the disk is full") if agreement.rank == 0 else OSError("no such file"))
        if agreement.rank == 0:
            told.wait()
        return str(cause)

    first, second = on_ranks(2, work)
    assert first == "the disk is full"
    assert "rank 0 has failed" in second and "the disk is full" in second
