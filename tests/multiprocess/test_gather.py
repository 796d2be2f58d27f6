"""A state in memory that the next ranks have only together: others, fewer, on other nodes, or without the one that is
lost. As real processes, each node with a shared memory of its own."""

from __future__ import annotations

import errno
import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import tenuto
from support.memory_ranks import ROWS, WIDTH, Ends, Layout, live, untouched
from support.memory_training import Life, shared_memory
from support.thinning import thinned
from tenuto import every
from tenuto.engine.memory_tier import slot_file
from tenuto.engine.memory_tier.listing import images
from tenuto.engine.staging import slots
from tenuto.integrations.torch.data import iteration
from tenuto.maintenance import gather
from tenuto.maintenance.verify import assert_whole
from tenuto.model.ids import CheckpointId
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the memory tier lies in shared memory on Linux only")

ALIKE = Layout(replicas=2, own=False, alike=True)
REPLICAS = Layout(replicas=2, own=False)


@dataclass(frozen=True)
class More(Layout):
    """One rank, `at`, has more than the others: `note`, a plain value; `tied`, the vector under another name; `mine`, a
    value of its own. `first`: what the first rank saves for all."""

    replicas: int = 2
    own: bool = False
    alike: bool = True
    what: str = ""
    at: int = 1

    def state_of(self, rank: int, ranks: int) -> dict[str, Any]:
        state = super().state_of(rank, ranks)
        more = {
            "note": [0],
            "tied": state["bias"],
            "mine": tenuto.per_rank([0]),
            "first": tenuto.first_rank([7 + rank]),
        }
        return {**state, self.what: more[self.what]} if rank == self.at or self.what == "first" else state


@pytest.fixture(autouse=True)
def no_loader_of_another_test() -> None:
    """The ranks are forked from this process, whose loaders their certificates would speak of."""
    iteration._iterators.clear()
    iteration._begun.clear()


@pytest.fixture
def nodes() -> Iterator[list[Path]]:
    with ExitStack() as stack:
        yield [stack.enter_context(shared_memory()) for _ in range(4)]


@pytest.fixture
def where(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "ckpts"
    assert_whole(Repo.open(open_store(tmp_path / "ckpts")))


def killed(where: Path, ranks: int, roots: Sequence[Path], step: int = 13, **options: Any) -> list[Life]:
    """All ranks have `step` and the one before in memory, and step 10 is in the store."""
    ends = {rank: Ends(step=step, settled=True) for rank in range(ranks)}
    return live(where, ranks, ends=ends, roots=roots[:ranks] if len(roots) >= ranks else roots * ranks, **options)


def left(roots: Sequence[Path]) -> list[str]:
    return sorted(
        path.name for root in roots for path in root.rglob("*-*") if path.is_file() and path.suffix != ".lock"
    )


def remove(root: Path, rank: int, *steps: int) -> None:
    with mock.patch.object(slots, "SHARED_MEMORY", str(root)):
        found = [one for one in images() if one.footer and one.footer.rank == rank and one.footer.id.step in steps]
    assert len(found) == len(steps)
    for one in found:
        Path(root, f"tenuto-{os.geteuid()}", one.name).unlink()


def began(job: list[Life]) -> list[tuple[int, int]]:
    return [(life.status, life.began) for life in job]


def said(job: list[Life], text: str) -> bool:
    return any(text in one for life in job for one in life.told("Warned"))


def right(layout: Layout, *jobs: list[Life]) -> None:
    """Every step of every rank has the state of an untouched training of as many ranks."""
    for job in jobs:
        expected = untouched(len(job), 60, layout)
        for rank, life in enumerate(job):
            assert life.digests == {step: expected[rank][step] for step in life.digests}, f"rank {rank}"


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on_from_what_those_before_had_in_memory(
    where: Path, nodes: list[Path], before: int, after: int
) -> None:
    roots = nodes[:1]
    killed(where, before, roots)
    last = live(where, after, roots=roots * after)
    assert began(last) == [(0, 13)] * after
    assert said(last, "saved as main/a0002/13 (")
    drawn = [np.random.default_rng(step).standard_normal((ROWS, WIDTH)).astype(np.float32) for step in range(1, 14)]
    found = tenuto.load(where, step=13).state
    table = np.zeros((ROWS, WIDTH), np.float32)
    for one in drawn:
        table += one
    assert np.array_equal(found["table"], table)
    assert left(nodes) == [], "the run is theirs, and has ended well"


def test_ranks_that_have_changed_nodes_go_on_from_memory_bit_for_bit(where: Path, nodes: list[Path]) -> None:
    layout = Layout()
    first = killed(where, 2, nodes, run="Large")
    last = live(where, roots=[nodes[1], nodes[0]], run="Large")
    assert began(last) == [(0, 13)] * 2
    right(layout, first, last)
    assert said(last, "step 13 is in the memory of 2 ranks: saved as large/a0002/13")
    assert left(nodes) == []


def test_a_node_takes_the_place_of_a_lost_one_and_its_rank_goes_on_as_the_others(
    where: Path, nodes: list[Path]
) -> None:
    """What rank 1 had its replica has too, and random generators are alike."""
    first = killed(where, 2, nodes, layout=ALIKE)
    last = live(where, roots=[nodes[0], nodes[2]], layout=ALIKE)
    assert began(last) == [(0, 13)] * 2
    right(ALIKE, first, last)
    assert last[0].drawn == last[1].drawn
    whole = live(where.parent / "whole", layout=ALIKE, roots=nodes[2:])
    assert last[1].drawn == {step: whole[1].drawn[step] for step in range(14, 21)}
    assert said(last, "), which all resume from; what rank 1 of 2 alone had is lost")
    assert last[0].memory and last[0].memory[0] == last[0].nbytes[0] > last[0].memory[1] == 0, "it has it in memory"
    certificate = tenuto.open(where, step=13).certificate
    assert certificate["verdict"] == "no known gap"


def test_generators_of_its_own_begin_new_streams_on_the_rank_that_was_lost_and_only_there(
    where: Path, nodes: list[Path]
) -> None:
    whole = live(where.parent / "whole", 4, layout=REPLICAS, roots=nodes)
    first = killed(where, 4, nodes, layout=REPLICAS)
    with shared_memory() as another:
        last = live(where, 4, roots=[another, *nodes[1:]], layout=REPLICAS)
    assert began(last) == [(0, 13)] * 4
    right(REPLICAS, first, last)
    for rank in (1, 2, 3):
        assert last[rank].drawn == {step: whole[rank].drawn[step] for step in range(14, 21)}
    streams = [tuple(life.drawn[step] for step in range(14, 21)) for life in (*last, whole[0])]
    assert len(set(streams)) == 5, "it is no copy of another rank's, nor its own"
    certificate = tenuto.open(where, step=13).certificate
    assert certificate["verdict"] == "not exact"
    assert certificate["reasons"] == [
        "the memory of rank 0 is lost: random generators (numpy, python) begin streams of their own there"
    ]


def test_fewer_ranks_go_on_without_the_lost_node(where: Path, nodes: list[Path]) -> None:
    killed(where, 4, nodes, layout=REPLICAS)
    last = live(where, 2, roots=[nodes[3], nodes[2]], layout=Layout(own=False))
    assert began(last) == [(0, 13)] * 2
    right(Layout(own=False), last)
    assert len({tuple(life.drawn.values()) for life in last}) == 2


@pytest.mark.parametrize("lost", ["own values", "rows", "position"])
def test_what_a_lost_rank_alone_had_sends_all_to_the_store(where: Path, nodes: list[Path], lost: str) -> None:
    layout = {"own values": Layout(replicas=2, alike=True), "rows": Layout(own=False), "position": ALIKE}[lost]
    more = {"data": [[1], [2]] * 20, "own_loop": True} if lost == "position" else {}
    first = killed(where, 2, nodes, layout=layout, **more)
    last = live(where, roots=[nodes[0], nodes[2]], layout=layout, **more)
    assert began(last) == [(0, 10)] * 2
    right(layout, first, last)
    why = {"own values": "per_rank", "rows": "table", "position": "data="}[lost]
    assert said(last, "step 13 is in the memory of 1 of 2 ranks, and is passed over: ") and said(last, why)


@pytest.mark.parametrize(("what", "lost"), [("note", 1), ("tied", 1), ("mine", 1), ("first", 0)])
def test_what_only_a_lost_rank_has_an_entry_for_sends_all_to_the_store(
    where: Path, nodes: list[Path], what: str, lost: int
) -> None:
    """A checkpoint without it would fit none of the ranks."""
    layout = More(what=what)
    killed(where, 2, nodes, layout=layout)
    last = live(where, roots=[nodes[2] if rank == lost else nodes[rank] for rank in range(2)], layout=layout)
    assert began(last) == [(0, 10)] * 2
    right(layout, last)
    alone = f"and is passed over: {what} was in the memory of rank {lost} alone"
    assert said(last, f"step 13 is in the memory of 1 of 2 ranks, {alone}")


def test_what_the_first_rank_saves_for_all_is_lost_with_no_other(where: Path, nodes: list[Path]) -> None:
    layout = More(what="first", replicas=3)
    killed(where, 3, nodes, layout=layout)
    last = live(where, 3, roots=[nodes[0], nodes[3], nodes[2]], layout=layout)
    assert began(last) == [(0, 13)] * 3
    right(layout, last)
    assert tenuto.load(where, step=13).state["first"] == [7]


def test_a_position_that_a_lost_rank_alone_had_sends_all_to_the_store(where: Path, nodes: list[Path]) -> None:
    more: dict[str, Any] = {"layout": ALIKE, "of_rank": lambda rank: {"data": [[1]] * 20} if rank == 0 else {}}
    killed(where, 2, nodes, own_loop=True, **more)
    last = live(where, roots=[nodes[2], nodes[1]], own_loop=True, **more)
    assert began(last) == [(0, 10)] * 2
    assert said(last, "and is passed over: the position in data= was in the memory of rank 0 alone")


def test_a_step_that_all_have_is_better_than_a_newer_one_without_a_rank(where: Path, nodes: list[Path]) -> None:
    first = killed(where, 2, nodes, layout=ALIKE, run="Large")
    remove(nodes[1], 1, 13)
    last = live(where, roots=nodes[:2], layout=ALIKE, run="Large")
    assert began(last) == [(0, 12)] * 2
    assert all(life.source.startswith("from memory, step 12") for life in last)
    right(ALIKE, first, last)


def test_a_state_of_which_an_image_is_damaged_is_passed_over_for_the_one_before(where: Path, nodes: list[Path]) -> None:
    killed(where, 3, nodes[:1])
    with mock.patch.object(slots, "SHARED_MEMORY", str(nodes[0])):
        found = next(one for one in images() if one.footer and (one.footer.rank, one.footer.id.step) == (2, 13))
    path = Path(nodes[0], f"tenuto-{os.geteuid()}", found.name)
    data = bytearray(path.read_bytes())
    assert found.footer is not None
    data[found.footer.image // 2] ^= 1
    path.write_bytes(data)
    last = live(where, 2, roots=nodes[:1] * 2)
    assert began(last) == [(0, 12)] * 2
    assert said(last, "step 13 is in the memory of 3 ranks, and is passed over: ")


@pytest.mark.parametrize("over_alive", [False, True])
def test_what_was_saved_since_memory_was_looked_at_is_not_left_behind(
    where: Path, nodes: list[Path], over_alive: bool
) -> None:
    """As by an owner that is leaving, or one that is claimed over alive: nothing is asked before that claim is put."""

    def earlier(rank: int) -> None:
        wanted, claim = gather.wanted, gather.claim

        def looked(*found: Any) -> list[gather.Gathering]:
            return [replace(one, base=CheckpointId("main", 1, 5)) for one in wanted(*found)]

        mock.patch.object(gather, "wanted", looked).start()
        if over_alive:
            unasked = lambda *words, **options: claim(*words, **{**options, "before_put": None})  # noqa: E731
            mock.patch.object(gather, "claim", unasked).start()

    first = killed(where, 2, nodes, save=every(steps=5))
    last = live(where, roots=[nodes[1], nodes[0]], before=earlier)
    assert began(last) == [(0, 10)] * 2
    right(Layout(), first, last)
    assert said(last, "step 13 is in the memory of 2 ranks, and is passed over: the run has been saved since")


def test_an_image_that_a_dying_process_holds_is_waited_for(where: Path, nodes: list[Path]) -> None:
    def held(rank: int) -> None:
        take = slot_file.take_slot
        answers = iter([BlockingIOError(errno.EAGAIN, "held")] * 2)

        def taken(slot: slots.Slot) -> slot_file.LastingSlot:
            error = next(answers, None) if "of2-" in slot.name else None
            if error is not None:
                raise error
            return take(slot)

        mock.patch.object(slot_file, "take_slot", taken).start()

    killed(where, 2, nodes[:1])
    last = live(where, 3, roots=nodes[:1] * 3, before=held)
    assert began(last) == [(0, 13)] * 3


@pytest.mark.parametrize(
    ("at", "rank"),
    [
        ("images to be gathered are open, run not yet claimed", 1),
        ("attempt claimed", 0),
        ("parts put and told, manifest not yet", 1),
        ("gathered state committed, still in memory", 0),
    ],
)
def test_killed_while_it_gathers_nothing_is_lost(where: Path, nodes: list[Path], at: str, rank: int) -> None:
    first = killed(where, 2, nodes)
    moved = [nodes[1], nodes[0]]
    second = live(where, roots=moved, ends={rank: Ends(at=at)})
    assert any(life.killed for life in second)
    last = live(where, roots=moved)
    assert began(last) == [(0, 13)] * 2
    right(Layout(), first, last)


POINTS = [
    "memory image captured, not sealed",
    "memory image sealed",
    "claimed, memory image not yet resealed",
    "what is in memory told, choice not yet heard",
    "images to be gathered are open, run not yet claimed",
    "gathered state committed, still in memory",
    "attempt claimed",
    "parts put and told, manifest not yet",
    "commit heard, not yet reported",
    "part restored, not yet voted for",
]


@pytest.mark.parametrize("seed", thinned(range(40), 40))
def test_whatever_number_starts_on_whatever_nodes_is_right_and_goes_back_behind_no_checkpoint(
    where: Path, nodes: list[Path], seed: int
) -> None:
    """Killed anywhere, with other numbers of ranks, on other nodes, some of which are lost: each state of each rank is
    what it has to be, and what its generator draws is as well."""
    chance = random.Random(seed)
    layout = chance.choice([ALIKE, Layout(own=False, alike=True)])
    rounds, each = 7, 8
    (whole,) = live(where.parent / "whole", 1, layout=layout, roots=nodes[3:], steps=rounds * each)
    durable = -1
    for number in range(rounds):
        ranks = chance.randint(1, 4)
        roots = [nodes[chance.randrange(3)] for _ in range(ranks)]
        if chance.random() < 0.4:
            for path in nodes[chance.randrange(3)].rglob("*"):
                path.unlink(missing_ok=True) if path.is_file() else None
        end = Ends(at=chance.choice(POINTS), count=chance.choice([1, 1, 2, 5, 9]))
        if chance.random() < 0.6:
            end = Ends(step=number * each + chance.randrange(1, each))
        ends = {} if number == rounds - 1 else {chance.randrange(ranks): end}
        job = live(where, ranks, layout=layout, roots=roots, ends=ends, steps=(number + 1) * each)
        begun = [life for life in job if life.digests]
        assert len({life.began for life in begun}) <= 1 and all(life.began >= durable for life in begun)
        right(layout, job)
        for life in begun:
            assert life.drawn == {step: whole.drawn[step] for step in life.drawn}
        if where.exists():
            durable = max((one.step for one in tenuto.Repository(where).checkpoints()), default=-1)
    assert durable == rounds * each
