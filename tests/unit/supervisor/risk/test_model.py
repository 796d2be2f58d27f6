"""Models of risk: trained by scikit-learn, evaluated by our own lines, on recordings in the order of time."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from support.made_up_telemetry import recording
from tenuto.errors import UsageError
from tenuto.supervisor.detectors.contract import END, Sample
from tenuto.supervisor.risk import train as training
from tenuto.supervisor.risk.evaluate import evaluate
from tenuto.supervisor.risk.model import Model, load
from tenuto.supervisor.risk.predict import ModelScorer
from tenuto.supervisor.risk.windows import Windows

if find_spec("sklearn") is None:  # loaded by what trains, and not by each worker that collects
    pytest.skip("needs scikit-learn", allow_module_level=True)

KINDS: list[Literal["logistic", "trees"]] = ["logistic", "trees"]


@pytest.mark.parametrize("kind", KINDS)
def test_it_foresees_what_grows_and_says_why(kind: Literal["logistic", "trees"], tmp_path: Path) -> None:
    samples = recording(1, faults=20)
    model, split = training.train([samples], kind, 600, 600)
    found = evaluate([samples], lambda: ModelScorer(model), split)
    assert found.since >= split and 4 <= found.faults <= 8
    assert found.precision is not None and found.precision >= 0.7
    assert found.recall is not None and found.recall >= 0.6
    assert found.lead_s is not None and 120 < found.lead_s <= 600
    assert found.brier is not None and found.brier_base is not None and found.brier < 0.6 * found.brier_base
    (tmp_path / "model.json").write_text(model.text())
    again = load(tmp_path / "model.json")
    scorer = ModelScorer(again)
    for number in range(40):
        scorer.take(Sample(number * 15, "memory", {"host_available_bytes": (30 - number * 0.7) * 2**30}))
    risk = scorer.risk(600)
    assert risk.probability > 0.5 and risk.horizon_s == 600
    assert any("memory." in reason for reason in risk.reasons), risk


def fitted(kind: str, table: np.ndarray, came: np.ndarray) -> tuple[Model, Any]:
    empty = Model(kind, 600, 600, 0.5, [f"a.b{one}" for one in range(table.shape[1])], [0.0] * table.shape[1], 0.0)  # type: ignore[arg-type]
    if kind == "logistic":
        from sklearn.linear_model import LogisticRegression

        scaled = (table - table.mean(axis=0)) / table.std(axis=0)
        theirs = LogisticRegression(C=0.1, max_iter=1000).fit(scaled, came)
        return training._logistic(empty, table, came), theirs.predict_proba(scaled)[:, 1]
    from sklearn.ensemble import GradientBoostingClassifier

    boosted = GradientBoostingClassifier(
        n_estimators=training.TREES, max_depth=training.DEPTH, learning_rate=0.1, min_samples_leaf=5, random_state=0
    ).fit(table, came)
    return training._boosted(empty, table, came), boosted.predict_proba(table)[:, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_our_lines_say_what_scikit_learn_says(kind: str) -> None:
    source = np.random.default_rng(4)
    table = source.normal(size=(400, 6)) * [1, 10, 1e9, 0.1, 1, 1]
    came = table[:, 0] + table[:, 2] / 1e9 + source.normal(size=400) > 0.8
    model, theirs = fitted(kind, table, came)
    model = load_text(model.text())
    for row, expected in zip(table, theirs, strict=True):
        found = model.score(dict(zip(model.features, row.tolist(), strict=True)))
        assert found.probability == pytest.approx(expected, abs=1e-9)


def load_text(text: str) -> Model:
    import tempfile

    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        path = Path(name) / "model.json"
        path.write_text(text)
        return load(path)


def test_the_reasons_of_trees_add_up_to_what_they_say() -> None:
    source = np.random.default_rng(5)
    table = source.normal(size=(300, 4))
    model, _ = fitted("trees", table, table[:, 1] > 0.5)
    assert set(model.trees[0].feature) == {-1, 1}
    risk = model.score({"a.b1": 2.0})
    assert risk.reasons[0].startswith("a b1 2") and risk.probability > 0.9


def test_nothing_after_the_split_is_learnt_from() -> None:
    """The same recording with another end gives the same model."""
    samples = recording(2, faults=10)
    model, split = training.train([samples], "logistic", 600, 600)
    changed = [
        one
        if one.at < split
        else Sample(one.at, one.source, {name: value * 3 for name, value in one.values.items()}, one.kind)
        for one in samples
    ]
    again, split_again = training.train([changed], "logistic", 600, 600)
    assert (again, split_again) == (model, split)


def test_without_a_fault_there_is_nothing_to_learn() -> None:
    quiet = [one for one in recording(3, faults=2) if one.source != END]
    with pytest.raises(UsageError, match="nothing to learn"):
        training.train([quiet], "logistic", 600, 600)


def test_a_window_ends_with_the_start_and_things_are_one() -> None:
    windows = Windows(100)
    for at in range(0, 100, 10):
        windows.take(Sample(at, "gpu", {"0.temperature": 60.0, "1.temperature": 60 + at / 10}))
    found = windows.features(90)
    assert found["gpu.temperature.last"] == found["gpu.temperature.max"] == 69
    assert found["gpu.temperature.slope"] == pytest.approx(6) and found["gpu.temperature.rise"] == 9
    assert found["end.count"] == 0 and found["end.since"] == 1000
    windows.take(Sample(95, END, {}, "killed"))
    assert windows.features(100) == {"end.count": 1, "end.since": 5}
    windows.take(Sample(99, END, {}, "asked to leave"))
    assert windows.features(100)["end.count"] == 1


def tampered(**changes: Any) -> str:
    model = Model("trees", 600, 600, 0.5, ["a.b"], [0.0], 0.0, trees=[])
    body = json.loads(model.text())
    tree = {"feature": [0, -1, -1], "threshold": [1, 0, 0], "left": [1, 0, 0], "right": [2, 0, 0], "value": [0, 1, -1]}
    return json.dumps({**body, "trees": [tree], **changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        tampered(format="another"),
        tampered(kind="pickle"),
        tampered(extra=1),
        tampered(threshold=math.nan),
        tampered(fill=[]),
        tampered(threshold=0),
        tampered(horizon_s="soon"),
        tampered(kind="logistic"),
        tampered(trees=[{"feature": [0], "threshold": [1], "left": [0], "right": [0], "value": [0]}]),
        tampered(trees=[{"feature": [5], "threshold": [1], "left": [1], "right": [1], "value": [0]}]),
    ],
)
def test_what_is_no_model_is_refused_and_never_loops(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(UsageError, match=r"model\.json cannot be read"):
        load(tmp_path / "model.json")
    assert load_text(tampered()).score({"a.b": 5.0}).probability == pytest.approx(1 / (1 + math.e))
