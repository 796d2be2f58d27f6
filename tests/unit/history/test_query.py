"""Conditions on checkpoints: what they mean, the same in Python and in SQL, and what they say of mistakes."""

from __future__ import annotations

import math
import sqlite3
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tenuto.errors import UsageError
from tenuto.history.query import FIELDS, Order, Query, quoted

NAMES = ("step", "size", "age", "run", "line", "tag", "verified", "val_loss", "eval.acc")
DAY = 86_400


def row(**values: Any) -> dict[str, Any]:
    return {"run": "main", "step": 500, "val_loss": 1.5, "tag": (), "verified": False, **values}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("val_loss < 2 and step > 100", {}),
        ("100 < step <= 500", {}),
        ("not (step < 100 or val_loss >= 2)", {}),
        ('size > "2 GiB"', {"size": 3 << 30}),
        ('age < "3d" and age > "36h"', {"age": 2 * DAY}),
        ('created >= "2026-01-31" and created < "2026-02-01T12:00"', {"created": "2026-01-31T08:00:00Z"}),
        ('run in ["gpt", "Main"]', {}),
        ('run == "MAIN"', {}),
        ("tag", {"tag": ("paper", "v2")}),
        ('tag == "v2" and tag != "v1" and tag not in ["v3", "v4"]', {"tag": ("paper", "v2")}),
        ("tag is None", {}),
        ('best == "val_loss"', {"best": "val_loss"}),
        ("verified and not damaged", {"verified": True, "damaged": False}),
        ("verified == False", {}),
        ("accuracy is None and val_loss is not None", {}),
        ("eval.acc > 0.9", {"eval.acc": 0.95}),
        ('metric["val/loss"] < 1e-3', {"val/loss": 1e-4}),
        ("val_loss < train_loss", {"train_loss": 1.6}),
        ("val_loss > -1.5 and -2 < val_loss", {}),
        ('line == "left"', {"line": "left"}),
        ("step < 10**0", None),
    ],
)
def test_what_matches(text: str, values: dict[str, Any] | None) -> None:
    if values is None:
        with pytest.raises(UsageError):
            Query.parse(text)
    else:
        assert Query.parse(text).matches(row(**values))


@pytest.mark.parametrize(
    "text", ["accuracy > 0", "accuracy <= 0", "not (accuracy > 0)", "accuracy > 0 and step > 1", "accuracy != 1"]
)
def test_a_missing_metric_makes_no_comparison_true(text: str) -> None:
    assert not Query.parse(text).matches(row())
    assert not Query.parse(text).matches(row(accuracy=math.nan))
    assert Query.parse(f"step == 500 or {text}").matches(row())


@pytest.mark.parametrize(
    ("text", "column", "word", "hint"),
    [
        ("val_loss <", 11, "not understood", None),
        ("  val_loss = 2", 12, "not understood", "== compares"),
        ("step > 2 GiB", 10, "not understood", "quotes"),
        ("__import__('os').system('x')", 1, "not a condition", None),
        ("step + 1 > 2", 1, "nothing of a checkpoint", None),
        ("1 < 2", 1, "nothing of a checkpoint", None),
        ("step", 1, "compared with what", "step < 2"),
        ('step > 1 and line == "lost"', 22, "current or left", None),
        ('line == "curent"', 9, "current or left", "did you mean 'current'?"),
        ('size > "2 apples"', 8, "not a number of bytes", "500GB"),
        ('age > "3 moons"', 7, "not a time", "36h"),
        ('created > "yesterday"', 11, "not compared with", "2026-01-31"),
        ("tag > 'a'", 1, "not ordered", None),
        ("step == 'a'", 9, "not compared with", None),
        ("verified == 1", 13, "not compared with", None),
        ("run in []", 8, "a list", None),
        ("step is 3", 9, "missing", None),
        ("step < run", 8, "each other", None),
        ('metric["step"] > 1', 1, "a field", None),
        ("é < 1 and (x for x in y)", 11, "not a condition", None),
        ("not " * 60 + "verified", 165, "nested", None),
    ],
)
def test_a_mistake_is_shown_where_it_is(text: str, column: int, word: str, hint: str | None) -> None:
    with pytest.raises(UsageError) as raised:
        Query.parse(text)
    assert f"column {column}: " in raised.value.message
    assert word in raised.value.message
    assert raised.value.hint and (hint or "") in raised.value.hint


@pytest.mark.parametrize("text", ["", "   ", "step > 1\n", "step > 1" + " or step > 1" * 300, "step > '\0'"])
def test_what_is_no_condition_at_all(text: str) -> None:
    with pytest.raises(UsageError, match="a condition"):
        Query.parse(text)


def test_a_name_that_nothing_has_is_shown_with_what_it_may_have_been() -> None:
    query = Query.parse("step > 1 and val_los < 2")
    assert query.names == ("step", "val_los") and query.metrics == ("val_los",)
    query.check(["val_los"])
    with pytest.raises(UsageError, match="column 14") as raised:
        query.check(["val_loss", "accuracy"])
    assert raised.value.hint == "did you mean 'val_loss'?"
    with pytest.raises(UsageError) as raised:
        Query.parse("verifed == 1").check([])
    assert raised.value.hint == "did you mean 'verified'?"


def test_orders() -> None:
    assert Order.parse("val_loss") == Order("val_loss", False)
    assert Order.parse("-step") == Order("step", True)
    Order.parse("-loss").check(["loss"])
    for wrong in ("-", ""):
        with pytest.raises(UsageError, match="names nothing"):
            Order.parse(wrong)
    with pytest.raises(UsageError) as raised:
        Order.parse("val_los").check(["val_loss"])
    assert raised.value.hint == "did you mean 'val_loss'?"


# -- the law: what matches in Python is what SQLite selects ------------------------------------------------------------

WORDS = ("a", "b", "current", "left", "Paper")
numbers = st.one_of(
    st.integers(-(1 << 63), (1 << 63) - 1), st.sampled_from([0, 1, 2, 1 << 53, (1 << 53) + 1]), st.floats(width=32)
)
literals = st.one_of(
    st.integers(0, 1 << 70), st.sampled_from([0, 1, 2, (1 << 53) + 1]), st.floats(0, allow_nan=False, width=32)
).map(lambda value: "1e999" if value == math.inf else repr(value))
values = st.fixed_dictionaries(
    {
        **{name: st.none() | numbers for name in ("step", "size", "age", "val_loss", "eval.acc")},
        "run": st.none() | st.sampled_from(WORDS[:4]),
        "line": st.sampled_from(["current", "left"]),
        "tag": st.lists(st.sampled_from(WORDS), max_size=3, unique=True).map(tuple),
        "verified": st.none() | st.booleans(),
    }
)
number_names = st.sampled_from(["step", "size", "age", "val_loss", "eval.acc"])
signs = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
negated = st.sampled_from(["", "not "])
comparisons = st.one_of(
    st.tuples(number_names, signs, literals | number_names),
    st.tuples(literals, signs, number_names, signs, literals),
    st.tuples(st.sampled_from(["tag"]), st.sampled_from(["==", "!="]), st.sampled_from(WORDS).map(repr)),
    st.tuples(
        st.sampled_from(["run", "tag"]),
        negated.map(lambda word: f"{word}in"),
        st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map(repr),
    ),
    st.tuples(st.just("line"), st.sampled_from(["==", "!=", "<"]), st.sampled_from(["'left'", "'current'"])),
    st.tuples(st.sampled_from(NAMES), st.just("is"), negated, st.just("None")),
    st.tuples(st.sampled_from(["verified", "tag", "verified == False", "verified != True"])),
).map(" ".join)
conditions = st.recursive(
    comparisons,
    lambda inner: st.one_of(
        inner.map(lambda one: f"not ({one})"),
        st.tuples(inner, st.sampled_from([" and ", " or "]), inner).map(lambda parts: f"({''.join(parts)})"),
    ),
    max_leaves=6,
)


def selected(query: Query, row: dict[str, Any]) -> bool:
    flat = {**row, "tag": "".join(f"\n{word}\n" for word in row["tag"])}
    with sqlite3.connect(":memory:") as database:
        database.execute(f"CREATE TABLE rows ({', '.join(map(quoted, NAMES))})")
        database.execute(f"INSERT INTO rows VALUES ({', '.join('?' * len(NAMES))})", [flat[name] for name in NAMES])
        clause, parameters = query.sql()
        (found,) = database.execute(f"SELECT count(*) FROM rows WHERE {clause}", parameters).fetchone()
    database.close()
    return bool(found)


@given(conditions, values)
@example("not (val_loss < 2)", dict.fromkeys(NAMES) | {"tag": ()})
@example("tag != 'a'", dict.fromkeys(NAMES) | {"tag": ("b", "a")})
def test_python_and_sql_agree(text: str, row: dict[str, Any]) -> None:
    query = Query.parse(text)
    assert query.matches(row) == selected(query, row), (text, row)
    assert set(query.names) <= set(NAMES) and all(name in FIELDS or "_" in name or "." in name for name in query.names)


def test_a_name_in_sql_is_quoted() -> None:
    clause, parameters = Query.parse('metric["a\\"b"] < 1').sql()
    assert clause == '("a""b" < ?)' and parameters == [1]
