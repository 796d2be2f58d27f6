"""Rules: findings with their probability, and faults that repeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from tenuto.supervisor.detectors.contract import END, FINDINGS, Finding, Sample
from tenuto.supervisor.risk.rules import RULES, Rules


@dataclass
class Warm:
    """Finds heat from 80 degrees on, and memory that will be full where it is told when."""

    source: str = "gpu"
    period_s: float = 5.0

    def sample(self) -> Mapping[str, float] | None:
        return None

    def judge(self, sample: Sample) -> Sequence[Finding]:
        if sample.source != self.source:
            return ()
        found = []
        if sample.values.get("temperature", 0) >= 80:
            found.append(Finding("gpu-hot", "92 °C, at its limit", subject="GPU 1"))
        if "full_in" in sample.values:
            found.append(Finding("memory", "full in 4 min", grace_s=sample.values["full_in"]))
        return found


def test_a_finding_counts_as_long_as_it_holds() -> None:
    rules = Rules([Warm()])
    assert rules.risk(0).probability == 0
    rules.take(Sample(1, "gpu", {"temperature": 85}))
    rules.take(Sample(2, "disk", {"free": 1.0}))
    found = rules.risk(3)
    assert found.probability == pytest.approx(RULES["gpu-hot"].probability)
    assert found.horizon_s == RULES["gpu-hot"].horizon_s and found.reasons == ("gpu-hot GPU 1: 92 °C, at its limit",)
    rules.take(Sample(4, "gpu", {"temperature": 60}))
    assert rules.risk(5).probability == 0


def test_several_findings_add_up_and_the_strongest_says_when() -> None:
    rules = Rules([Warm()])
    rules.take(Sample(1, "gpu", {"temperature": 85, "full_in": 240.0}))
    found = rules.risk(2)
    assert found.probability == pytest.approx(1 - 0.2 * 0.8) and found.horizon_s == 240
    assert found.reasons == ("memory: full in 4 min", "gpu-hot GPU 1: 92 °C, at its limit")


def test_faults_that_repeat_are_to_be_expected_again_and_an_end_clears_the_rest() -> None:
    rules = Rules([Warm()])
    rules.take(Sample(1, "gpu", {"temperature": 85}))
    rules.take(Sample(10, END, {}, "hung"))
    assert rules.risk(11).probability == 0
    rules.take(Sample(500, END, {}, "asked to leave"))
    assert rules.risk(501).probability == 0
    for at in (1000, 1500, 2000):
        rules.take(Sample(at, END, {}, "killed"))
    found = rules.risk(2001)
    assert found.probability == pytest.approx(0.49, abs=0.01) and found.reasons == ("4 faults within 1 h 00 min",)
    assert rules.risk(5700).probability == 0


def test_every_rule_is_of_a_finding_and_a_probability() -> None:
    assert set(RULES) <= set(FINDINGS)
    assert all(0 < rule.probability < 1 and rule.horizon_s > 0 for rule in RULES.values())
