"""What is done about each cause of an end: told from last words, looked up in a table, and kept for the next start."""

from __future__ import annotations

from typing import Any

import pytest

import tenuto
from tenuto.errors import UsageError
from tenuto.supervisor.decide import CAUSES, Ending, Kind, Limits, decide
from tenuto.supervisor.restart import Restart, restart
from tenuto.supervisor.strategies import STRATEGIES, TABLE, Recovery, Rules, cause_of, decisive, evidence_of, written
from tenuto.telemetry.last_words import LastWords, of_error


def words(step: int = 7, *, at: float = 0.0, rank: int = 0, message: str = "", **more: Any) -> LastWords:
    return LastWords(1, rank, step, at, message, where="/ckpts", run="main", **more)


def of(error: BaseException) -> LastWords:
    found = of_error(error)
    assert found is not None
    return words(message=found[0], errors=found[1])


def ending(kind: Kind, *, at: float = 0.0, new: bool = True, said: LastWords | None = None) -> Ending:
    return Ending(kind, 1, at - 1, at, 7, new, "why", said)


class OutOfMemoryError(RuntimeError):
    """As torch names its own."""


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (of(ValueError("bad")), "failed"),
        (of(MemoryError()), "out of memory"),
        (of(OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")), "out of memory"),
        (of(RuntimeError("RESOURCE_EXHAUSTED: out of device memory")), "out of memory"),
        (of(RuntimeError("CUDA error: an illegal memory access was encountered")), "device"),
        (of(tenuto.errors.StoreFull("no room", subject="x", hint="y")), "disk full"),
        (of(OSError(28, "No space left on device")), "disk full"),
        (of(tenuto.errors.NothingRestorable("all are damaged", subject="x", hint="y")), "damaged"),
        (words(unhealthy=True), "unhealthy"),
    ],
)
def test_the_cause_is_told_from_the_error(said: LastWords, cause: str) -> None:
    assert cause_of(said) == cause


def test_what_is_no_failure_leaves_no_words() -> None:
    assert of_error(SystemExit(3)) is None and of_error(KeyboardInterrupt()) is None
    assert of_error(SystemExit("no data")) == ("SystemExit: no data", ("SystemExit", "BaseException"))


def test_the_rank_that_failed_first_says_most_and_not_one_that_lost_another() -> None:
    lost = of(tenuto.errors.RankFailed("rank 3 is gone", subject="x", hint="y", ranks=(3,)))
    late, early = words(at=2.0, rank=3, message="ValueError: bad"), words(at=5.0, rank=1)
    assert decisive([lost, early, late]) is late and decisive([lost]) is lost and decisive([]) is None
    assert evidence_of(late, 4) == "ValueError: bad, on rank 3" and evidence_of(late, 1) == "ValueError: bad"


def test_every_cause_has_a_strategy_and_users_put_theirs_over_it() -> None:
    assert set(TABLE) == set(CAUSES) and set(TABLE.values()) <= set(STRATEGIES)
    rules = written(["hung=stop", "out-of-memory=smaller-batch:3"])
    assert rules.table["hung"] == "stop" and rules.table["killed"] == TABLE["killed"]
    assert rules.most == {"out of memory": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [("hung", "is not a cause"), ("hang=stop", "no 'hang', but failed"), ("hung=jump", "no 'jump', but restart"),
     ("hung=stop:0", "is not a cause")],
)  # fmt: skip
def test_what_is_not_in_the_table_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        written([text])


def test_a_cause_has_a_budget_of_its_own_or_none() -> None:
    endings = [ending("hung", at=10.0 * n) for n in range(3)]
    assert decide(endings, Limits(per_cause={"killed": 1, "hung": 3})).restart
    assert "hung (why), 3 times within an hour" in decide(endings, Limits(per_cause={"hung": 2})).reason
    assert "not to be started again" in decide(endings, Limits(final=["hung"])).reason


def test_batches_halve_and_accumulation_keeps_the_effective_batch() -> None:
    recovery = Recovery()
    assert recovery.prepare([ending("out of memory")], print) == "and asked for 1/2 of the batch"
    recovery.prepare([ending("out of memory")] * 2, print)
    recovery.prepare([*[ending("out of memory")] * 2, ending("killed")], print)
    found = restart(recovery.next.variables())
    assert (found.number, found.cause, found.batch_scale, found.accumulation) == (3, "killed", 0.25, 4)


def test_fewer_ranks_from_the_second_time_within_an_hour() -> None:
    recovery, command = Recovery(sizes=[8, 4]), ["torchrun", "--nproc-per-node={ranks}", "train.py"]
    assert recovery.command(command)[1] == "--nproc-per-node=8"
    assert recovery.prepare([ending("device")], print) == ""
    assert recovery.prepare([ending("device"), ending("device", at=9999)], print) == ""
    twice = [ending("device", at=1), ending("device", at=2)]
    assert recovery.prepare(twice, print) == "with 4 ranks"
    assert recovery.prepare([*twice, ending("device", at=3)], print) == ""
    assert recovery.command(command)[1] == "--nproc-per-node=4"


def test_a_rollback_names_the_steps_to_skip_and_goes_further_back_where_it_was_in_vain() -> None:
    asked: list[int] = []

    def roll_back(said: LastWords, before: int) -> int:
        asked.append(before)
        return before - 2

    recovery = Recovery(roll_back=roll_back)
    bad = words(7, unhealthy=True)
    assert recovery.prepare([ending("unhealthy", said=bad)], print) == "from step 5, before what went wrong"
    assert restart(recovery.next.variables()).skip == (range(6, 8),)
    recovery.prepare([ending("unhealthy", said=bad, new=False)], print)
    assert asked == [7, 5]
    found = restart(recovery.next.variables())
    assert [step for step in range(1, 10) if found.skips(step)] == [4, 5, 6, 7] and len(found.skip) == 1
    recovery.prepare([ending("unhealthy", said=words(20, unhealthy=True))], print)
    assert restart(recovery.next.variables()).skip == (range(4, 8), range(19, 21))


def test_what_cannot_be_done_is_said_and_keeps_nobody_from_starting() -> None:
    said: list[str] = []
    recovery = Recovery(Rules({"failed": "rollback"}), roll_back=lambda said, before: None)
    assert recovery.prepare([ending("failed")], said.append) == ""
    assert recovery.prepare([ending("failed", said=words(3))], said.append) == ""
    assert said == [
        "rollback is not possible: the training has not said which run it trains, and where",
        "rollback is not possible: run 'main' has no healthy checkpoint before step 3",
    ]


def test_nothing_supervises_and_what_cannot_be_read_is_a_first_start() -> None:
    assert tenuto.restart({}) == Restart() == tenuto.restart({"TENUTO_SKIP_STEPS": "a-b"})
    assert tenuto.restart({"TENUTO_BATCH_SCALE": "0"}) == Restart()
