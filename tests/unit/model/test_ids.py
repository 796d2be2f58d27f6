"""Names of directories as steps."""

from __future__ import annotations

from tenuto.model.ids import parse_step, parse_steps


def test_names_of_steps_are_read_one_by_one_and_all_at_once_alike() -> None:
    names = ["step-00000002", "step-00000010", "step-0000001", "step-000000010", "step-1234567890", "step-٠٠٠٠٠٠٠١"]
    names += ["step-00000003x", "xstep-00000003", "step-00000004\n", "", f"step-{10**18 - 1}", f"step-{10**18}"]
    each = [step for name in names if (step := parse_step(name)) is not None]
    assert parse_steps([name for name in names if name.isprintable()]) == sorted(each, reverse=True)
    assert sorted(each) == [2, 10, 1234567890, 10**18 - 1]
