import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.errors import UsageError
from tenuto.policy import every, keep, on
from tenuto.policy.save import Decision, Moment, SaveHistory, SavePolicy

FRESH = SaveHistory(started_s=100.0)


def saved_steps(policy, steps, history=FRESH):
    return [step for step in steps if policy.decide(Moment(step=step, now_s=100.0), history).save]


def test_every_steps_saves_at_multiples_of_the_completed_steps():
    assert saved_steps(every(steps=200), range(1, 1001)) == [200, 400, 600, 800, 1000]


def test_every_steps_is_pure_in_the_step_after_a_resume():
    resumed = SaveHistory(started_s=0.0, first_step=330, last_saved_step=330)
    assert saved_steps(every(steps=200), range(331, 901), resumed) == [400, 600, 800]


def test_a_step_is_never_saved_twice_and_the_restored_one_not_again():
    history = SaveHistory(started_s=0.0, first_step=400, last_saved_step=400)
    policy = every(steps=200) | on.end()
    assert policy.decide(Moment(step=400, now_s=1.0, ending=True), history) == Decision(
        False, "no step was completed since the start"
    )
    saved = SaveHistory(started_s=0.0, last_saved_step=600, last_saved_s=5.0)
    assert policy.decide(Moment(step=600, now_s=6.0, ending=True), saved) == Decision(
        False, "step 600 is saved already"
    )
    assert not policy.decide(Moment(step=0, now_s=6.0, ending=True), FRESH).save


def test_every_minutes_counts_from_the_start_and_then_from_the_last_save():
    policy = every(minutes=10)
    assert not policy.decide(Moment(step=5, now_s=699.0), FRESH).save
    assert policy.decide(Moment(step=5, now_s=700.0), FRESH) == Decision(
        True, "10.0 minutes since the start (every 10)"
    )
    saved = SaveHistory(started_s=100.0, last_saved_step=5, last_saved_s=700.0)
    assert not policy.decide(Moment(step=6, now_s=1299.0), saved).save
    assert policy.decide(Moment(step=6, now_s=1330.0), saved).reason == "10.5 minutes since the last save (every 10)"


def test_every_epochs_saves_at_the_end_of_an_epoch_only():
    policy = every(epochs=2)
    assert not policy.decide(Moment(step=9, now_s=0, epoch=2), FRESH).save
    assert not policy.decide(Moment(step=9, now_s=0, epoch=1, epoch_ended=True), FRESH).save
    assert policy.decide(Moment(step=9, now_s=0, epoch=2, epoch_ended=True), FRESH) == Decision(
        True, "epoch 2 (every 2 epochs)"
    )
    assert not policy.decide(Moment(step=9, now_s=0), FRESH).save


def test_end_and_signal():
    assert on.end().decide(Moment(step=3, now_s=0, ending=True), FRESH) == Decision(True, "training ends")
    assert on.end().decide(Moment(step=3, now_s=0), FRESH) == Decision(False, "nothing asked for it")
    assert on.signal().decide(Moment(step=3, now_s=0, signal="SIGTERM"), FRESH) == Decision(True, "SIGTERM came")
    assert not on.signal().decide(Moment(step=3, now_s=0, ending=True), FRESH).save


def test_several_intervals_mean_any_and_all_reasons_are_told():
    policy = every(steps=10, minutes=1) | on.end()
    decision = policy.decide(Moment(step=10, now_s=160.0, ending=True), FRESH)
    assert decision.reason == "step 10 (every 10 steps); 1.0 minutes since the start (every 1); training ends"


def test_only_a_policy_with_on_signal_catches_signals():
    assert (every(steps=1) | (on.end() | on.signal())).catches_signals
    assert not (every(steps=1) | on.end()).catches_signals


def test_repr_is_what_one_writes():
    policy = every(steps=200, minutes=0.5) | on.end() | on.signal()
    assert repr(policy) == "every(steps=200) | every(minutes=0.5) | on.end() | on.signal()"
    assert eval(repr(policy)) == policy


@pytest.mark.parametrize("bad", [0, -1, 2.0, math.nan, True, False, "200", None.__class__, 10.5, np.float64(3.0)])
def test_steps_and_epochs_must_be_whole_and_positive(bad):
    for unit in ("steps", "epochs"):
        with pytest.raises(UsageError) as caught:
            every(**{unit: bad})
        assert f"every({unit}=" in str(caught.value)
        assert caught.value.hint


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf, -math.inf, True, "ten", 0.0, [], 10**400])
def test_minutes_must_be_a_duration(bad):
    with pytest.raises(UsageError):
        every(minutes=bad)


def test_numbers_of_numpy_are_numbers():
    assert every(steps=np.int64(5)) == every(steps=5)
    assert every(minutes=np.float32(0.5)) == every(minutes=0.5)


def test_every_without_an_interval_is_an_error():
    with pytest.raises(UsageError, match=r"every\(\) of what"):
        every()


def test_sides_do_not_mix():
    with pytest.raises(UsageError, match="does not combine"):
        every(steps=2) | keep.latest(2)
    with pytest.raises(UsageError, match="does not combine"):
        keep.latest(2) | on.end()


class FirstTen(SavePolicy):
    def wants(self, now, history):
        return "one of the first ten" if now.step <= 10 else None


def test_a_user_writes_one_by_a_single_method():
    assert saved_steps(FirstTen() | every(steps=15), range(1, 31)) == [*range(1, 11), 15, 30]


@settings(derandomize=True, max_examples=50)
@given(st.integers(1, 50), st.integers(0, 60))
def test_wherever_one_starts_the_saved_steps_are_the_same(interval, start):
    """Ranks and attempts that join at any step agree on what `every(steps=)` saves."""
    history = SaveHistory(started_s=0, first_step=start, last_saved_step=start)
    late = saved_steps(every(steps=interval), range(start + 1, 121), history)
    assert late == [step for step in saved_steps(every(steps=interval), range(1, 121)) if step > start]


def at(step, **metrics):
    return Moment(step=step, now_s=0.0, metrics=metrics)


def before(*losses):
    return SaveHistory(started_s=0.0, last_saved_step=len(losses), saved=[{"loss": loss} for loss in losses])


def test_improve_and_drop_say_what_they_need():
    policy = on.improve("val_loss") | on.drop("loss", by="5%") | every(steps=3)
    assert policy.metrics() == {"val_loss", "loss"}
    assert every(steps=3).metrics() == frozenset()


def test_improve_and_drop_are_written_as_one_writes_them():
    policy = (
        on.improve("a", mode="max", by="2.5%") | on.improve("b", by=0.5) | on.drop("c", by=1) | on.drop("d", by="5%")
    )
    assert (
        repr(policy) == "on.improve('a', mode='max', by='2.5%') | on.improve('b', mode='min', by=0.5) | "
        "on.drop('c', by=1) | on.drop('d', by='5%')"
    )
    assert eval(repr(policy)) == policy


def test_at_least_means_at_least_also_in_decimals():
    assert on.improve("loss", by=0.1).decide(at(9, loss=0.9), before(1.0)).save
    assert not on.improve("loss", by=0.1).decide(at(9, loss=0.9001), before(1.0)).save
    assert on.drop("loss", by=0.1).decide(at(9, loss=0.3), before(9.0, 0.4)).save
    assert on.drop("loss", by="10%").decide(at(9, loss=0.27), before(0.3)).save


@pytest.mark.parametrize("bad", [-1, "5", "five%", math.nan, math.inf, True, None, "-5%", "nan%", b"5%"])
def test_margins_are_checked(bad):
    with pytest.raises(UsageError, match=r"on\.improve\('loss', by="):
        on.improve("loss", by=bad)
    with pytest.raises(UsageError, match=r"on\.drop\('loss', by="):
        on.drop("loss", by=bad)


def test_what_makes_no_sense_of_metrics_is_refused():
    for call in (lambda: on.drop("loss", by=0), lambda: on.improve(""), lambda: on.improve("loss", mode="low")):
        with pytest.raises(UsageError):
            call()


losses = st.lists(st.one_of(st.just(math.nan), st.sampled_from([math.inf, -math.inf]), st.floats(-9, 9)), max_size=30)


@settings(derandomize=True, max_examples=50)
@given(losses, st.sampled_from(["min", "max"]))
def test_what_improve_saves_is_strictly_better_each_time_and_ends_at_the_best(values, mode):
    saved = []
    for step, value in enumerate(values, start=1):
        if (
            on.improve("loss", mode=mode)
            .decide(at(step, loss=value), SaveHistory(0.0, saved=[{"loss": v} for v in saved]))
            .save
        ):
            saved.append(value)
    real = [value for value in values if not math.isnan(value)]
    sign = 1 if mode == "min" else -1
    assert all(sign * (one - two) > 0 for one, two in itertools.pairwise(saved))
    assert saved[-1:] == ([min(real) if mode == "min" else max(real)] if real else [])
