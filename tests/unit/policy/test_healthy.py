"""Retention and unhealthy checkpoints: the newest healthy one stays, and none that is unhealthy is best."""

from __future__ import annotations

from tenuto.model.ids import CheckpointId
from tenuto.policy import keep
from tenuto.policy.keep import CheckpointFacts, KeepPolicy


def facts(step: int, newest: int, **more: object) -> CheckpointFacts:
    return CheckpointFacts(CheckpointId("a", 1, step), walk=newest - step, **more)  # type: ignore[arg-type]


def kept(policy: KeepPolicy, history: list[CheckpointFacts]) -> dict[int, str]:
    return {one.id.step: one.reason for one in policy.decide(history) if one.keep}


def test_the_newest_healthy_one_is_kept_beside_any_number_of_unhealthy_ones() -> None:
    history = [facts(step, 6, healthy=step <= 2) for step in range(1, 7)]
    assert set(kept(keep.latest(2), history)) == {2, 5, 6}
    assert "the last healthy one" in kept(keep.latest(2), history)[2]


def test_a_damaged_one_is_not_the_healthy_one_to_go_back_to() -> None:
    history = [facts(1, 3), facts(2, 3, suspect=True), facts(3, 3, healthy=False)]
    assert "the last healthy one" in kept(keep.latest(1), history)[1]


def test_where_the_newest_is_healthy_nothing_more_is_kept() -> None:
    history = [facts(step, 3) for step in (1, 2, 3)]
    assert list(kept(keep.latest(1), history)) == [3]


def test_what_is_unhealthy_is_never_best() -> None:
    history = [facts(step, 3, metrics={"loss": 1.0 / step}, healthy=step < 3) for step in (1, 2, 3)]
    verdicts = {one.id.step: one for one in keep.best(1, "loss").decide(history)}
    assert verdicts[2].keep and "the best by loss" in verdicts[2].reason
    assert not verdicts[1].keep and "best" not in verdicts[3].reason
