"""What an alarm is worth, and that no predictor is expensive, however wrong it is."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.made_up_telemetry import recording
from tenuto.supervisor.detectors.contract import END, STEPS, Finding, Sample
from tenuto.supervisor.risk.model import Risk
from tenuto.supervisor.risk.predict import EVERY_S, RiskPredictor, rules
from tenuto.supervisor.risk.trust import BUDGET, Alarm, Ledger, Trust


@dataclass
class Scripted:
    """States what it is told to."""

    state: Callable[[float], Risk]
    threshold: float = 0.3
    taken: list[Sample] = field(default_factory=list)

    def take(self, sample: Sample) -> None:
        self.taken.append(sample)

    def risk(self, now: float) -> Risk:
        return self.state(now)


def always(now: float) -> Risk:
    return Risk(1.0, 600.0, ("because",))


@dataclass
class Training:
    """A training that saves every `every_s` and when it is asked to, and fails at `faults`; it is down for a while
    after each. Time passes by a second; a save takes `save_s` of it."""

    every_s: float
    save_s: float
    faults: list[float]
    predictor: RiskPredictor | None = None
    work: float = 0.0
    asked: int = 0

    def run(self, until_s: float) -> float:
        """Returns the work that is done at the end."""
        now = begun = 0.0
        saved = self.work
        saves, since, faults = 0, 0.0, list(self.faults)
        while now < until_s:
            samples = []
            if faults and now >= faults[0]:
                faults.pop(0)
                samples.append(Sample(now, END, {}, "killed"))
                self.work, saves, since = saved, 0, now + 30
                now = begun = now + 30
            samples.append(
                Sample(now, STEPS, {"step": now - begun, "saves": saves, "save_s": self.save_s if saves else 0.0})
            )
            finding: Finding | None = None
            if self.predictor is not None:
                finding = self.predictor.observe(samples, now)
            wanted = finding is not None
            self.asked += wanted
            if wanted or now - since >= self.every_s:
                now += self.save_s
                saved, saves, since = self.work, saves + 1, now
            now, self.work = now + 1, self.work + 1
        return self.work


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 10_000), st.floats(0.02, 1.0), st.floats(0.0, 1.0), st.floats(5, 900),
    st.sampled_from([1.0, 5.0, 20.0]), st.booleans(),
)  # fmt: skip
def test_a_predictor_never_costs_more_than_a_hundredth_of_the_time(
    seed: int, precision: float, recall: float, lead_s: float, save_s: float, adversarial: bool
) -> None:
    source, until_s, mtbf_s = random.Random(seed), 20_000.0, 3000.0
    faults, at = [], 0.0
    while (at := at + source.expovariate(1 / mtbf_s) + 60) < until_s:
        faults.append(at)
    alarms = [at - lead_s for at in faults if source.random() < recall]
    alarms += [source.uniform(0, until_s) for _ in range(int(len(alarms) * (1 / precision - 1)))]

    def state(now: float) -> Risk:
        return Risk(0.9 if any(0 <= now - one <= lead_s for one in alarms) else 0.0, 600.0)

    predictor = RiskPredictor(Scripted(always if adversarial else state))
    training = Training(900, save_s, faults, predictor)
    training.run(until_s)
    assert training.asked * save_s <= BUDGET * until_s * 1.001 + 0.001
    assert predictor.trust.spent_s <= BUDGET * until_s


def test_on_the_average_the_worst_predictor_loses_less_than_a_hundredth_and_a_good_one_gains() -> None:
    lost, gained = [], []
    for seed in range(6):
        source = random.Random(seed)
        faults, at = [], 0.0
        while (at := at + source.expovariate(1 / 2000) + 60) < 30_000:
            faults.append(at)

        def foreseen(now: float, faults: list[float] = faults) -> Risk:
            return Risk(0.9 if any(0 < at - now <= 60 for at in faults) else 0.0, 120.0)

        plain = Training(900, 5, faults).run(30_000)
        lost.append(1 - Training(900, 5, faults, RiskPredictor(Scripted(always))).run(30_000) / plain)
        gained.append(Training(900, 5, faults, RiskPredictor(Scripted(foreseen))).run(30_000) / plain - 1)
    assert sum(lost) / len(lost) < BUDGET
    assert sum(gained) / len(gained) > 0.05


def test_a_save_is_asked_for_only_where_enough_is_at_stake() -> None:
    """A save takes 20 s and alarms were right half of the time: 40 s of work make one worth it."""
    trust = Trust(Ledger(right=50, wrong=50))
    trust.take(Sample(0.0, STEPS, {"saves": 0}))
    trust.take(Sample(10_000.0, STEPS, {"saves": 1, "save_s": 20.0}))
    alarm = trust.ledger.raised(Risk(0.5, 600), 0.3, 10_000.0)
    assert alarm is not None
    assert not trust.heed(alarm, 10_035.0)
    assert trust.heed(alarm, 10_041.0)
    assert not trust.heed(alarm, 10_100.0)  # again only at the rate of the window: sqrt(2 * 20 * 600 / 0.5) = 219 s
    assert not trust.heed(alarm, 10_259.0)
    assert trust.heed(alarm, 10_262.0)


def test_an_alarm_that_comes_too_late_for_a_save_is_not_heeded() -> None:
    for save_s, heeded in ((30.0, True), (61.0, False)):
        trust = Trust()
        trust.take(Sample(0.0, STEPS, {"saves": 0}))
        trust.take(Sample(100_000.0, STEPS, {"saves": 1, "save_s": save_s}))
        alarm = trust.ledger.raised(Risk(0.9, 60), 0.3, 101_000.0)
        assert alarm is not None and trust.heed(alarm, 101_000.0) is heeded


def test_what_it_stated_gives_way_to_what_it_showed() -> None:
    ledger = Ledger()
    assert ledger.precision(0.8) == pytest.approx(0.8)
    for number in range(98):
        ledger.raised(Risk(0.8, 10), 0.3, number * 100.0)
        ledger.expire(number * 100.0 + 50)
    assert (ledger.right, ledger.wrong) == (0, 98) and ledger.precision(0.8) == pytest.approx(0.016)
    ledger.raised(Risk(0.8, 10), 0.3, 50_000.0)
    ledger.take(Sample(50_004.0, END, {}, "hung"))
    ledger.take(Sample(50_500.0, END, {}, "killed"))
    ledger.raised(Risk(0.8, 10), 0.3, 51_000.0)
    ledger.take(Sample(51_004.0, END, {}, "asked to leave"))  # nobody knows what would have come
    assert (ledger.right, ledger.wrong, ledger.faults) == (1, 98, 2)
    assert ledger.recall == pytest.approx(2 / 4) and list(ledger.leads_s) == [4.0]


def test_the_finding_names_figures_and_history_and_is_returned_once() -> None:
    predictor = RiskPredictor(Scripted(lambda now: Risk(0.7, 600, ("memory is full in 4 min",))))
    predictor.trust.ledger.right, predictor.trust.ledger.wrong = 3, 1
    assert predictor.observe([Sample(0.0, STEPS, {"saves": 0})], 0.0) is None
    found = predictor.observe([Sample(9000.0, STEPS, {"saves": 1, "save_s": 1.0})], 9000.0)
    assert found is None  # just saved
    found = predictor.observe([], 9000.0 + EVERY_S)
    assert found is not None and found.name == "risk" and found.grace_s == 600
    assert found.evidence == (
        "a fault within 10 min 00 s with a probability of 0.70: memory is full in 4 min; "
        "3 of 5 alarms so far were right"
    )
    assert predictor.observe([], 9006.0) is None and predictor.observe([], 9010.0) is None


def test_an_earlier_recording_tells_how_good_it_was_and_spends_nothing() -> None:
    samples = recording(7)
    faults = sum(one.source == END for one in samples)
    predictor = RiskPredictor(Scripted(always))
    predictor.replay(samples)
    ledger = predictor.trust.ledger
    assert ledger.faults == faults and faults - 3 <= ledger.right <= faults < ledger.wrong
    assert predictor.trust.spent_s == 0 and predictor.observe([], samples[-1].at + 1) is None


def test_a_save_that_took_longer_than_believed_is_paid_for_by_the_next_ones() -> None:
    trust = Trust()
    trust.take(Sample(0.0, STEPS, {"saves": 1, "save_s": 1.0}))
    trust.take(Sample(1000.0, STEPS, {"saves": 1, "save_s": 1.0}))
    alarm = trust.ledger.raised(Risk(0.9, 600), 0.3, 1000.0)
    assert alarm is not None and trust.heed(alarm, 1000.0) and trust.spent_s == 1.0
    trust.take(Sample(1300.0, STEPS, {"saves": 2, "save_s": 290.0}))
    trust.take(Sample(1400.0, STEPS, {"saves": 3, "save_s": 300.0}))  # one that nobody asked for
    assert trust.spent_s == 290.0
    alarm = Alarm(50_000.0, Risk(0.9, 600))
    assert not trust.heed(alarm, 50_000.0) and trust.heed(alarm, 60_000.0)


def test_a_recording_that_broke_off_says_nothing_of_this_start() -> None:
    killed = [Sample(0.0, "preemption", {"aws.answers": 1.0, "aws.grace_s": 60.0})]
    predictor = RiskPredictor(rules())
    predictor.replay(killed)
    assert predictor.scorer.risk(5.0).probability == 0 and predictor.trust.ledger.open is None


def test_the_risk_is_scored_where_the_clock_was_set_back() -> None:
    scripted = Scripted(always)
    predictor = RiskPredictor(scripted)
    predictor.observe([], 10_000.0)
    assert predictor.trust.ledger.open is not None
    predictor.trust.ledger.open = None
    predictor.observe([], 100.0)
    assert predictor.trust.ledger.open is not None
