"""Ranks that meet: in one place, and of one mind about who writes what. And saves that one of them wishes for: once for
each reason, and never for one that is just being taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.rank_threads import together
from tenuto.engine.group import rounds
from tenuto.engine.group.group import JobGroup
from tenuto.errors import DeadlineExceeded, ObjectNotFound, RanksDisagree, UsageError
from tenuto.events import Emitter
from tenuto.model import canonical_json
from tenuto.policy import every, on
from tenuto.policy.save import Moment, SaveHistory, split_by_agreement
from tenuto.ranks.kv.in_process import ThreadRanks
from tenuto.ranks.proposals import Proposal
from tenuto.store.contract import Reader
from tenuto.store.memory import MemoryStore
from tenuto.training.saves import SaveAdmission


class Agreed:
    """The first rank's side of an agreement on what is proposed for given steps; takes down what is wished for."""

    is_coordinator, rank, world_size = True, 0, 2

    def __init__(self, *proposals: Proposal) -> None:
        self._proposals = {one.step: one for one in proposals}
        self.wishes: list[str] = []
        self.agreed_save: Proposal | None = None

    def at(self, step: int, deadline: float) -> Proposal | None:
        return self._proposals.get(step)

    def request_save(self, reason: str) -> None:
        self.wishes.append(reason)


def test_a_save_that_is_agreed_on_is_not_wished_for_again_at_its_own_step() -> None:
    """That of the policy's clock runs anew only once the save is taken."""
    agreement = Agreed(Proposal(1, 3, "10 min have passed", 0))
    group = JobGroup(agreement, "main", Emitter())  # type: ignore[arg-type]
    last_s, saved = 0.0, []
    for step in range(1, 7):
        group.completed(step, None, ending=False)
        now_s = 601.0 + step
        history = SaveHistory(started_s=0.0, first_step=0, last_saved_step=None, last_saved_s=last_s)
        moment = Moment(step=step, now_s=now_s)
        if group.decide(split_by_agreement(on.end() | every(minutes=10)), moment, history, None).save:
            saved.append(step)
            last_s = now_s
    assert saved == [3]
    assert len(agreement.wishes) == 1, "at step 1, and never again"


def test_a_save_that_is_still_to_come_is_what_is_wished_for() -> None:
    """Only a signal asks for one of its own: all leave where it is what they save for."""
    agreement = Agreed(Proposal(1, 3, "in place of the torn save of step 1", 1), Proposal(2, 6, "SIGTERM came", 0))
    group = JobGroup(agreement, "main", Emitter())  # type: ignore[arg-type]
    history = SaveHistory(started_s=0.0, first_step=0, last_saved_step=None, last_saved_s=0.0)
    left = []
    for step in range(1, 7):
        agreement.agreed_save = next((one for at, one in agreement._proposals.items() if step <= at), None)
        left.append(group.completed(step, "SIGTERM" if step > 1 else None, ending=False))
        group.decide(
            split_by_agreement(on.end() | every(minutes=10)), Moment(step=step, now_s=601.0 + step), history, None
        )
        if step == 1:
            assert agreement.wishes == [], "the clock's"
    assert agreement.wishes == ["SIGTERM came"], "at step 2"
    assert left == [None] * 5 + ["SIGTERM"]


class Board:
    """What the first rank announces about saves that may be skipped, topic by topic."""

    is_coordinator, rank, world_size = False, 1, 2

    def __init__(self, *announced: tuple[int, bool]) -> None:
        self._announced = list(announced)

    def round(self, kind: str) -> Any:
        assert kind == "turn"
        announced = self._announced.pop(0)

        class Topic:
            def __enter__(self) -> Topic:
                return self

            def __exit__(self, *words: object) -> None: ...

            def receive(self, deadline: float, phase: str) -> bytes:
                return canonical_json.dumps(list(announced))

        return Topic()


class Free:
    free, in_flight = True, ()


class Busy:
    """A writer that does not get on."""

    free, in_flight = False, ()

    class repo:
        url = "elsewhere"

    def await_free(self, timeout: float) -> bool:
        return False


def turns(saver: Any, agreement: Any, *, skip: bool) -> tuple[SaveAdmission, list[int]]:
    missed: list[int] = []
    group = JobGroup(agreement, "main", Emitter())
    found = SaveAdmission(saver, "main", Emitter(), skip=skip, group=group, missed=lambda step, _: missed.append(step))
    return found, missed


def test_a_save_that_the_first_rank_takes_and_this_one_never_comes_to_is_told_as_missed() -> None:
    found, missed = turns(Free(), Board((10, False), (15, False), (20, True), (25, False)), skip=True)
    with pytest.raises(RanksDisagree):
        found.await_for(5, must=False)
    assert missed == []
    assert found.await_for(15, must=False) == 0.0
    assert missed == [10]
    assert found.await_for(25, must=False) == 0.0
    assert missed == [10], "what is skipped nobody waits for"


def test_who_cannot_begin_a_save_since_the_one_before_hangs_tells_the_others() -> None:
    found, missed = turns(Busy(), Agreed(), skip=False)
    with pytest.raises(DeadlineExceeded):
        found.await_for(7, must=True)
    assert missed == [7]


# -- one place ---------------------------------------------------------------------------------------------------------


class Late(MemoryStore):
    """As a network file system looks from a node that has remembered for a while that a name was absent."""

    def __init__(self, name: str, times: int) -> None:
        super().__init__(name)
        self.times = times
        self.unseen: dict[str, int] = {}

    def _look(self, name: str) -> None:
        file = name.rpartition("/")[2]
        if file in ("tenuto.json", "tenuto.copy.json", "attempt.json", "begin.json"):
            self.unseen[file] = self.unseen.get(file, 0) + 1
            if self.unseen[file] <= self.times:
                raise ObjectNotFound(f"{name} is not there yet", subject=name)

    def get(self, name: str, *, limit: int) -> bytes:
        self._look(name)
        return super().get(name, limit=limit)

    def open(self, name: str) -> Reader:
        self._look(name)
        return super().open(name)


def test_what_a_place_shows_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "POLL_S", 0.001)
    stores = [MemoryStore("late"), Late("late", 2)]
    stores[0].place.objects.clear()

    def work(ranks: ThreadRanks) -> Any:
        return tenuto.save({"w": np.ones(3)}, stores[ranks.rank], ranks=ranks).step

    assert together(2, work) == [0, 0]
    assert {file: count > 2 for file, count in stores[1].unseen.items()} == {  # type: ignore[attr-defined]
        "tenuto.json": True,
        "tenuto.copy.json": False,
        "attempt.json": True,
        "begin.json": True,
    }


def test_a_one_off_save_of_ranks_in_copies_of_a_place_is_refused_and_gives_the_run_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rounds, "VISIBLE_S", 0.1)
    stores = [MemoryStore("staged"), MemoryStore("staged, copied")]
    for store in stores:
        store.place.objects.clear()
    tenuto.save({"w": np.ones(3)}, stores[0], ranks=tenuto.Solo(), run="before")
    stores[1].place.objects.update(stores[0].place.objects)
    before = dict(stores[1].place.objects)

    def save(ranks: ThreadRanks, **more: Any) -> Any:
        return tenuto.save({"w": np.ones(3)}, stores[ranks.rank], ranks=ranks, **more)

    for one in together(2, save):
        assert isinstance(one, RanksDisagree) and one.ranks == (1,), one
        assert "a copy lies there, without attempt 1 of run 'main'" in one.message and one.hint is not None
    assert stores[1].place.objects == before
    stores[1] = stores[0]
    assert [one.attempt for one in together(2, save)] == [2, 2]
    assert together(2, lambda ranks: tenuto.load(stores[ranks.rank], ranks=ranks).step) == [0, 0]


# -- who writes what ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["save", "Checkpointer"])
def test_writers_that_are_none_are_refused(tmp_path: Path, how: str) -> None:
    with pytest.raises(UsageError, match="writers='all' is not one of 'balanced', 'layer', 'tensor', 'size', 'one'"):
        getattr(tenuto, how)(*((tmp_path / "x", {})[:: 1 if how == "Checkpointer" else -1]), writers="all")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("how", ["save", "Checkpointer"])
def test_ranks_that_give_different_writers_are_told_so_when_they_meet(tmp_path: Path, how: str) -> None:
    def work(ranks: ThreadRanks) -> Any:
        state, writers = {"w": np.ones(3)}, "one" if ranks.rank else "balanced"
        if how == "save":
            return tenuto.save(state, tmp_path / "x", ranks=ranks, writers=writers)  # type: ignore[arg-type]
        return tenuto.Checkpointer(tmp_path / "x", state, ranks=ranks, writers=writers)  # type: ignore[arg-type]

    for one in together(2, work):
        assert isinstance(one, RanksDisagree), one
        assert "writers is 'balanced' on rank 0" in one.message and "'one' on rank 1" in one.message
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("how", ["save", "Checkpointer"])
def test_writers_are_who_writes(tmp_path: Path, how: str) -> None:
    """Also of a job that goes on from what it finds, and knows by then how much its image takes."""
    state = {"w": np.arange(300_000.0)}

    def work(ranks: ThreadRanks) -> None:
        if how == "save":
            tenuto.save(state, tmp_path, ranks=ranks, step=2, writers="one")
            return
        for end in (1, 2):
            with tenuto.Checkpointer(tmp_path, state, ranks=ranks, save=on.end(), writers="one") as ckpt:
                list(ckpt.steps(end))

    assert together(2, work) == [None, None]
    last = tenuto.load(tmp_path, ranks=tenuto.Solo()).checkpoint.id
    nbytes = [(tmp_path / last.directory / f"rank-{rank:05d}.safetensors").stat().st_size for rank in (0, 1)]
    assert last.step == 2 and nbytes[0] >= state["w"].nbytes and nbytes[1] < 65_536, nbytes
