"""Faults as they are written and drawn."""

import pytest

from tenuto.errors import UsageError
from tenuto.supervisor.chaos import Fault, drawn, written


def test_faults_are_read_in_the_order_of_their_times() -> None:
    assert written("25s:stop, 10:kill,1.5s:abort") == [Fault(1.5, "abort"), Fault(10, "kill"), Fault(25, "stop")]


def test_faults_at_a_step_come_in_the_order_of_their_steps() -> None:
    assert written("step 90:hang,step40:nan,1s:kill", 3.0) == [
        Fault(0.0, "nan", 40, lasts_s=3.0), Fault(0.0, "hang", 90, lasts_s=3.0), Fault(1.0, "kill", lasts_s=3.0),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "kill", "10s:kil", "x:kill", "10s:kill;20s:kill"])
def test_what_is_no_fault_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        written(text)


def test_drawn_faults_are_those_of_the_seed_and_come_as_often_as_asked_for() -> None:
    faults = drawn(10, 2000, ["kill", "stop"], 4)
    assert faults == drawn(10, 2000, ["kill", "stop"], 4) != drawn(10, 2000, ["kill", "stop"], 5)
    assert 9 < faults[-1].at_s / 2000 < 11
    assert {fault.kind for fault in faults} == {"kill", "stop"}
