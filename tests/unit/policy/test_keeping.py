import datetime
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.errors import UsageError
from tenuto.model.ids import CheckpointId
from tenuto.policy import every, keep
from tenuto.policy.keep import CheckpointFacts, KeepPolicy, Opinion, protections

NAN, INF = math.nan, math.inf


def line(*losses, attempt=1, walk=0, **facts):
    """Checkpoints of one attempt, newest first, 100 steps apart; None has no metric."""
    return [
        CheckpointFacts(
            CheckpointId("r", attempt, 100 * (len(losses) - place)),
            None if walk is None else walk + place,
            {} if loss is None else {"loss": loss},
            **facts,
        )
        for place, loss in enumerate(losses)
    ]


def kept(policy, history):
    return [verdict.id.step for verdict in policy.decide(history) if verdict.keep]


def test_latest_keeps_the_newest():
    assert kept(keep.latest(2), line(*[None] * 5)) == [500, 400]


def test_all_keeps_all():
    assert kept(keep.all(), line(None, None, None)) == [300, 200, 100]


def test_best_keeps_the_lowest_or_the_highest_and_what_latest_means():
    history = line(0.5, 0.2, 0.9, 0.1, 0.3)
    assert kept(keep.best(2, "loss"), history) == [500, 400, 200]
    assert kept(keep.best(2, "loss", mode="max"), history) == [500, 300]


def test_best_prefers_the_newer_of_equals():
    assert kept(keep.best(1, "loss"), line(0.5, 0.2, 0.2)) == [300, 200]


def test_nan_is_never_best_not_even_the_only_one():
    assert kept(keep.best(1, "loss"), line(0.5, NAN, 0.4)) == [300, 100]
    assert kept(keep.best(3, "loss"), line(NAN, NAN, NAN)) == [300]
    assert kept(keep.best(1, "loss", mode="max"), line(0.5, NAN, 0.6)) == [300, 100]


def test_infinity_compares():
    assert kept(keep.best(1, "loss"), line(0.5, INF, -INF)) == [300, 100]
    assert kept(keep.best(1, "loss", mode="max"), line(0.5, INF, -INF)) == [300, 200]


def test_i7_one_without_its_metric_is_judged_only_when_a_newer_one_has_it():
    assert kept(keep.best(1, "loss"), line(None, None, 0.3, None, 0.2)) == [500, 400, 100]
    assert kept(keep.best(1, "loss"), line(None, None, None)) == [300, 200, 100]


def test_best_after_a_rollback_keeps_the_best_of_the_run_and_of_the_line_that_goes_on():
    history = [*line(0.5, 0.4, attempt=2), *line(0.1, 0.2, attempt=1, walk=None)]
    assert [v.keep for v in keep.best(1, "loss").decide(history)] == [True, True, True, False]


def test_latest_after_a_rollback_counts_the_line_that_goes_on_first():
    left = line(None, None, attempt=1, walk=None)
    assert [v.keep for v in keep.latest(3).decide([*line(None, None, attempt=2), *left])] == [True, True, True, False]
    assert [v.keep for v in keep.latest(2).decide([*line(None, None, attempt=2), *left])] == [True, True, False, False]


def test_a_damaged_one_takes_no_place():
    whole, damaged = line(None, None, None, None), line(None, None, None, None, suspect=True)
    history = [whole[0], damaged[1], whole[2], damaged[3]]
    assert kept(keep.latest(2), history) == [400, 300, 200]
    whole, damaged = line(0.9, 0.1, 0.2, 0.3), line(0.9, 0.1, 0.2, 0.3, suspect=True)
    assert kept(keep.best(1, "loss"), [whole[0], damaged[1], whole[2], whole[3]]) == [400, 300, 200]


def test_verdicts_come_in_the_order_given():
    history = line(None, None, None)[::-1]
    assert [verdict.id for verdict in keep.latest(1).decide(history)] == [facts.id for facts in history]


def test_a_union_tells_the_metrics_it_needs():
    policy = keep.best(1, "loss") | keep.latest(1) | keep.best(2, "accuracy", mode="max")
    assert policy.metrics() == {"loss", "accuracy"}
    assert keep.latest(1).metrics() == frozenset()
    assert eval(repr(policy)) == policy


@pytest.mark.parametrize("bad", [0, -3, 1.0, NAN, True, "3", None])
def test_counts_must_be_whole_and_positive(bad):
    with pytest.raises(UsageError, match=r"keep\.latest"):
        keep.latest(bad)
    with pytest.raises(UsageError, match=r"keep\.best"):
        keep.best(bad, "loss")


def test_mode_and_metric_are_checked():
    with pytest.raises(UsageError, match="neither 'min' nor 'max'"):
        keep.best(1, "loss", mode="lowest")
    with pytest.raises(UsageError, match="names no metric"):
        keep.best(1, "")


def test_a_checkpoint_given_twice_is_an_error():
    with pytest.raises(UsageError, match="twice"):
        keep.latest(1).decide(line(None) * 2)


def test_only_a_keep_policy_combines():
    with pytest.raises(UsageError, match="does not combine"):
        keep.latest(1) | every(steps=1)


class Nothing(KeepPolicy):
    def judge(self, history):
        return [Opinion(False, "not wanted") for _ in history]


values = st.one_of(st.none(), st.sampled_from([NAN, INF, -INF, 0.0, -0.0]), st.floats(-2, 2))
flags = st.booleans()


@st.composite
def histories(draw):
    """Runs of several attempts that go on from, or fall back behind, what came before; some are gone."""
    facts, walk = {}, []
    for attempt in range(1, draw(st.integers(1, 4)) + 1):
        if walk and draw(flags):
            walk = walk[: draw(st.integers(1, len(walk)))]
        start = walk[-1][1] if walk else 0
        steps = sorted(draw(st.sets(st.integers(start + 1, start + 30), max_size=6)))
        walk = [*walk, *((attempt, step) for step in steps)]
        for step in steps:
            loss = draw(values)
            facts[attempt, step] = {
                "metrics": {} if loss is None else {"loss": loss},
                "verified": draw(st.integers(0, 3)) == 0,
                "suspect": draw(st.integers(0, 5)) == 0,
                "created_s": draw(st.one_of(st.none(), st.integers(0, 200_000).map(float), st.sampled_from(JUMPS))),
                "pinned": draw(st.integers(0, 7)) == 0,
                "tags": ("baseline",) if draw(st.integers(0, 7)) == 0 else (),
                "held": draw(st.integers(0, 7)) == 0,
                "copied_to": "s3://bucket" if draw(st.integers(0, 7)) == 0 else "",
                "needed_by": ("run b was started from it",) if draw(st.integers(0, 7)) == 0 else (),
                "bytes": draw(st.integers(0, 9)),
                "bases": tuple(CheckpointId("r", *key) for key in sorted(facts) if draw(st.integers(0, 5)) == 0),
                "forked_from": "base" if attempt == 1 else "",
                "rolled_back": attempt % 2 == 0,
            }
    position = {key: place for place, key in enumerate(reversed(walk))}
    history = [CheckpointFacts(CheckpointId("r", *key), position.get(key), **fact) for key, fact in facts.items()]
    return draw(st.permutations([facts for facts in history if draw(st.integers(0, 4))]))


JUMPS = (-4e9, 0.0, 86_400.0 * 59, 86_400.0 * 365, 4e9)
"""Times of clocks that jump."""
counts = st.integers(1, 4)
spans = st.builds(
    lambda made, last: made(last),
    st.sampled_from([keep.hourly, keep.daily, keep.weekly, keep.monthly, keep.yearly]),
    st.none() | counts,
)
ages = st.builds(lambda unit, n: keep.within(**{unit: n}), st.sampled_from(["hours", "days", "weeks"]), counts)
events = st.sampled_from(["attempt", "fork", "rollback"]).map(keep.after)
latest_policies = counts.map(keep.latest)
best_policies = st.builds(keep.best, counts, st.just("loss"), st.sampled_from(["min", "max"]))
milestones = st.one_of(
    st.integers(1, 15).map(lambda n: keep.every(steps=n)),
    st.sampled_from([0.5, 6, 24]).map(lambda h: keep.every(hours=h)),
)
singles = st.one_of(st.just(Nothing()), latest_policies, best_policies, milestones, spans, ages, events)
unlimited = st.one_of(singles, st.builds(lambda one, other: one | other, singles, singles))
limits = st.builds(lambda one, nbytes: keep.limit(one, bytes=nbytes), unlimited, st.integers(1, 60))
policies = st.one_of(unlimited, limits)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(histories(), policies)
def test_i7_retention_never_removes_what_is_protected(history, policy):
    removed = {verdict.id for verdict in policy.decide(history) if not verdict.keep}
    walk = sorted((facts for facts in history if facts.walk is not None), key=lambda facts: facts.walk)
    verified = [facts for facts in walk if facts.verified]
    assert not removed & {facts.id for facts in (*walk[:1], *verified[:1])}
    for facts in history:
        if facts.pinned or facts.tags or facts.held or facts.copied_to or facts.needed_by:
            assert facts.id not in removed


@settings(derandomize=True, max_examples=40, deadline=None)
@given(histories(), best_policies)
def test_i7_best_judges_only_what_has_its_metric_or_is_older_than_one_that_has(history, policy):
    newest = max((facts.age_key for facts in history if "loss" in facts.metrics), default=(0, 0))
    for facts, verdict in zip(history, policy.decide(history), strict=True):
        if "loss" not in facts.metrics and facts.age_key > newest:
            assert verdict.keep


@settings(derandomize=True, max_examples=40, deadline=None)
@given(histories(), best_policies)
def test_best_keeps_n_that_nothing_removed_beats_and_not_many_more(history, policy):
    sign = 1 if policy.mode == "min" else -1
    verdicts = {verdict.id: verdict for verdict in policy.decide(history)}
    judged = [f for f in history if "loss" in f.metrics and not math.isnan(f.metrics["loss"]) and not f.suspect]
    kept_ones = [facts for facts in judged if verdicts[facts.id].keep]
    removed = [facts for facts in judged if not verdicts[facts.id].keep]
    assert not removed or len(kept_ones) >= policy.n
    for loser in removed:
        better = [w for w in kept_ones if sign * w.metrics["loss"] <= sign * loser.metrics["loss"]]
        assert len(better) >= policy.n
    extra = sum(bool(reasons) for reasons in protections(history).values())
    assert len(kept_ones) <= 2 * policy.n + extra


@settings(derandomize=True, max_examples=40, deadline=None)
@given(histories(), latest_policies)
def test_latest_keeps_exactly_n_whole_ones_beside_the_protected(history, policy):
    whole = [facts for facts in history if not facts.suspect]
    named = [v for v in policy.decide(history) if v.keep and ("newest of" in v.reason or "the newest" in v.reason)]
    undamaged = {facts.id for facts in whole}
    assert sum(v.id in undamaged for v in named) == min(policy.n, len(whole))


@settings(derandomize=True, max_examples=40, deadline=None)
@given(histories(), policies, st.randoms(use_true_random=False))
def test_the_order_of_the_facts_does_not_matter_and_every_verdict_has_its_reason(history, policy, random):
    shuffled = list(history)
    random.shuffle(shuffled)
    verdicts = policy.decide(history)
    assert sorted(verdicts, key=lambda v: v.id) == sorted(policy.decide(shuffled), key=lambda v: v.id)
    assert all(verdict.reason and verdict.reason == verdict.reason.strip() for verdict in verdicts)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(histories(), singles, singles)
def test_a_union_keeps_what_either_keeps(history, one, other):
    def kept_by(policy):
        return {verdict.id for verdict in policy.decide(history) if verdict.keep}

    assert kept_by(one | other) == kept_by(one) | kept_by(other)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(histories(), policies)
def test_removing_what_was_judged_and_judging_again_removes_nothing_more_of_the_live_line(history, policy):
    """What retention leaves stands: a second pass over it finds nothing to do."""
    left = {verdict.id for verdict in policy.decide(history) if verdict.keep}
    again = policy.decide([facts for facts in history if facts.id in left])
    assert all(verdict.keep for verdict in again)


def taken(history):
    """Bytes of these checkpoints and of those on which they rest."""
    return {id for facts in history for id in (facts.id, *facts.bases)}


@settings(derandomize=True, max_examples=150, deadline=None)
@given(histories(), limits)
def test_a_limit_keeps_of_what_its_policy_keeps_what_fits_and_the_least_worth_goes(history, policy):
    size = {facts.id: facts.bytes for facts in history}
    why = protections(sorted(history, key=lambda facts: facts.age_key, reverse=True))
    protected = [facts for facts in history if why[facts.id]]
    before = {verdict.id for verdict in policy.inner.decide(history) if verdict.keep}
    after = {verdict.id for verdict in policy.decide(history) if verdict.keep}
    left = [facts for facts in history if facts.id in after]
    nbytes, most = sum(size.get(id, 0) for id in taken(left)), policy.budget.nbytes
    assert {facts.id for facts in protected} <= after <= before
    may_go = [facts for facts in left if facts.id not in taken(protected)]
    assert nbytes <= most or not may_go
    assert bool(policy.warnings(history)) == (sum(size.get(id, 0) for id in taken(protected)) > most)
    if before == after:
        return
    gone = [facts for facts in history if facts.id in before - after]
    named = {"newest": [], "other": []}
    for facts, opinion in zip(history, policy.inner.judge(history), strict=True):
        best = any("best" in part for part in opinion.reason.split("; "))
        newest = any("newest" in part and "within" not in part for part in opinion.reason.split("; "))
        if opinion.keep and not best:
            named["newest" if newest or "may still be noted" in opinion.reason else "other"].append(facts)
    for kind in named.values():
        stay = [facts.age_key for facts in kind if facts in may_go]
        went = [facts.age_key for facts in kind if facts in gone]
        assert not stay or not went or max(went) < min(stay), "the older goes first"
    if any(facts in gone for facts in named["newest"]):
        assert not any(facts in may_go for facts in named["other"]), "milestones go before the newest"


@settings(derandomize=True, max_examples=40, deadline=None)
@given(histories(), st.integers(1, 15))
def test_every_span_that_has_a_whole_checkpoint_keeps_one(history, n):
    policy = keep.every(steps=n)
    kept_ones = {verdict.id for verdict in policy.decide(history) if verdict.keep}
    for facts in history:
        span = facts.id.step // n
        if not facts.suspect and (span or not facts.id.step):
            same = [f for f in history if f.id.step // n == span and not f.suspect]
            assert any(f.id in kept_ones and (f.walk is not None or facts.walk is None) for f in same)


def test_milestones_stay_while_training_goes_on_and_retention_follows_each_save():
    """Permanent: whatever the saves are, the milestones that stay are the first of each span."""
    there, policy = [], keep.every(steps=1000) | keep.latest(2)
    for step in range(130, 6000, 130):
        there.append(step)
        history = [
            CheckpointFacts(CheckpointId("r", 1, s), place, created_s=0.0) for place, s in enumerate(reversed(there))
        ]
        there = sorted(verdict.id.step for verdict in policy.decide(history) if verdict.keep)
    assert there == [1040, 2080, 3120, 4030, 5070, 5850, 5980]


def test_spans_of_hours_begin_at_midnight_and_without_a_time_nothing_is_a_milestone():
    def at(step, created_s, walk):
        return CheckpointFacts(CheckpointId("r", 1, step), walk, created_s=created_s)

    day = 86400.0
    history = [at(5, None, 0), at(4, 2 * day, 1), at(3, 2 * day - 1, 2), at(2, day, 3), at(1, None, 4)]
    assert kept(keep.every(hours=24), history) == [5, 4, 2]
    before_1970 = [at(2, -1.0, 0), at(1, -day, 1)]
    assert kept(keep.every(hours=24), before_1970) == [2, 1]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: keep.every(), "every\\(\\) of what"),
        (lambda: keep.daily(0), r"keep.daily\(0\) would never be reached"),
        (lambda: keep.weekly(1.5), r"keep.weekly\(1.5\) is not a whole number"),
        (lambda: keep.within(days=0), r"keep.within\(days=0\) is not a duration"),
        (lambda: keep.within(), r"within\(\) of what"),
        (lambda: keep.within(weeks=-1), r"keep.within\(weeks=-1\) is not a duration"),
        (lambda: keep.hourly(0), r"keep.hourly\(0\) would never be reached"),
        (lambda: keep.monthly("3"), r"keep.monthly\('3'\) is not a whole number"),
        (lambda: keep.yearly(True), r"keep.yearly\(True\) is not a count"),
        (lambda: keep.after("restart"), "'restart' is not an event"),
        (lambda: keep.limit(keep.all()), "no budget"),
        (lambda: keep.limit(keep.all(), cost=1), "a cost and no price"),
        (lambda: keep.limit(keep.all(), per_gib_month=1), "a price and no cost"),
        (lambda: keep.limit(keep.all(), bytes=1, cost=1, per_gib_month=1), "two budgets"),
        (lambda: keep.limit(keep.all(), bytes=0), "bytes=0 is not a number of bytes"),
        (lambda: keep.limit(keep.all(), cost=0, per_gib_month=1), "not a duration"),
        (lambda: keep.limit(every(steps=3), bytes=1), "does not say what to keep"),
        (lambda: keep.every(steps=0), "would never be reached"),
        (lambda: keep.every(steps=2.5), "not a whole number"),
        (lambda: keep.every(hours=0), "not a duration"),
        (lambda: keep.every(hours="24"), "not a duration"),
        (lambda: keep.every(hours=NAN), "not a duration"),
    ],
)
def test_milestones_are_checked(call, text):
    with pytest.raises(UsageError, match=text):
        call()


def test_milestones_are_written_as_one_writes_them():
    policy = keep.every(steps=1000, hours=0.5) | keep.latest(1)
    assert repr(policy) == "keep.every(steps=1000) | keep.every(hours=0.5) | keep.latest(1)"
    assert eval(repr(policy)) == policy


def test_policies_are_written_as_one_writes_them():
    for written in (
        "keep.hourly(24) | keep.daily() | keep.weekly(8) | keep.monthly(12) | keep.yearly(10)",
        "keep.within(hours=36) | keep.within(weeks=1, days=2) | keep.after('fork')",
        "keep.limit(keep.all(), bytes='2TB')",
        "keep.limit(keep.latest(1) | keep.best(1, 'loss', mode='min'), cost=100, per_gib_month=0.023) | keep.latest(2)",
    ):
        assert repr(eval(written)) == written and eval(written) == eval(written)


def test_months_and_years_are_those_of_the_calendar():
    policy = keep.monthly()
    for day in [*range(-1000, 1500), *range(-800_000, 2_000_000, 9973)]:
        date = datetime.date.fromordinal(min(max(day + 719_163, 1), datetime.date.max.toordinal()))
        facts = CheckpointFacts(CheckpointId("r", 1, 1), 0, created_s=(date.toordinal() - 719_163) * 86_400.0 + 5)
        assert policy.span(facts) == date.year * 12 + date.month - 1
        assert keep.yearly().span(facts) == date.year


def test_a_limit_is_asked_about_its_metrics_and_keeps_not_everything():
    policy = keep.limit(keep.all() | keep.best(1, "loss"), bytes="1GB")
    assert policy.metrics() == {"loss"} and not policy.keeps_all() and not (policy | keep.latest(1)).keeps_all()
    assert [type(part).__name__ for part in (policy | keep.latest(1)).parts()] == ["All", "Best", "Latest"]


def test_what_a_budget_cannot_meet_is_named():
    history = [
        CheckpointFacts(CheckpointId("r", 1, 300 - 100 * place), place, bytes=1 << 30, pinned=place == 1)
        for place in range(3)
    ]
    assert keep.limit(keep.all(), bytes="3GiB").warnings(history) == []
    (words,) = (keep.limit(keep.all(), bytes="1GiB") | keep.latest(1)).warnings(history)
    assert words == (
        "the budget of 1.00 GiB is not met, since what may not go takes 2.00 GiB: "
        "a0001/300 (what latest means), a0001/200 (pinned)"
    )
    policy = keep.daily() | keep.daily(7) | keep.weekly(2) | keep.within(days=0.5)
    assert repr(policy) == "keep.daily() | keep.daily(7) | keep.weekly(2) | keep.within(days=0.5)"
    assert eval(repr(policy)) == policy


everything = st.one_of(
    latest_policies, best_policies, milestones, st.builds(keep.within, days=st.floats(0.01, 1e4)), st.just(keep.all()),
    st.builds(keep.daily, st.none() | counts), st.builds(keep.weekly, counts),
)  # fmt: skip


@given(st.lists(everything, min_size=1, max_size=4))
def test_what_a_training_records_is_read_as_it_was(parts):
    policy = parts[0]
    for part in parts[1:]:
        policy = policy | part
    assert repr(keep.recorded({"keep": repr(policy)})) == repr(policy)


@pytest.mark.parametrize(
    "text",
    [
        None, 7, "", "keep", "keep.latest", "keep.latest(0)", "keep.latest(n=3, m=4)", "keep.latest('3')", "latest(3)",
        "keep.latest(3) | 5", "keep.latest(3) + keep.latest(4)", "keep.KeepPolicy()", "keep.math.floor(1)",
        "keep.latest(__import__('os').getpid())", "(" * 500, "keep.latest(3) | " * 1000, "<Mine object>",
        "keep.latest(3)\0",
    ],
)  # fmt: skip
def test_what_is_not_a_policy_of_ours_is_none(text):
    assert keep.recorded({} if text is None else {"keep": text}) is None
