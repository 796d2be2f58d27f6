"""Trains a small model of risk on recordings, with scikit-learn. It needs the extra `risk`; what it makes does not."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import numpy as np

from tenuto.errors import MissingExtra, UsageError, install
from tenuto.supervisor.detectors.contract import Sample
from tenuto.supervisor.risk.evaluate import evaluate, moments_of
from tenuto.supervisor.risk.model import Model, Risk, Tree
from tenuto.supervisor.risk.predict import ModelScorer
from tenuto.supervisor.risk.windows import Windows

TRAINED_ON: Final = 0.7
"""The share of moments, the earliest ones, that a model is trained on; it is evaluated on the rest."""
THRESHOLDS: Final = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
TREES: Final = 60
DEPTH: Final = 2
_RECORD: Final = "tenuto run --record telemetry.jsonl -- python train.py"


class _Features:
    """Keeps what a scorer would see, in place of a score."""

    threshold = 1.0

    def __init__(self, window_s: float, horizon_s: float) -> None:
        self._windows, self._horizon_s = Windows(window_s), horizon_s
        self.rows: list[dict[str, float]] = []

    def take(self, sample: Sample) -> None:
        self._windows.take(sample)

    def risk(self, now: float) -> Risk:
        self.rows.append(self._windows.features(now))
        return Risk(0.0, self._horizon_s)


def train(
    recordings: Sequence[Sequence[Sample]], kind: Literal["logistic", "trees"], horizon_s: float, window_s: float
) -> tuple[Model, float]:
    """Trains on the earliest moments of all recordings. Returns the model, and the time from which on it has seen
    nothing: evaluate it from there.

    horizon_s: how soon a fault counts. window_s: how far back features look. Raises MissingExtra without scikit-learn,
    and UsageError where no fault, or nothing but faults, can be learnt from.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise MissingExtra("training a model of risk needs scikit-learn", hint=install("risk"))
    seen: list[tuple[float, dict[str, float], bool]] = []
    for samples in recordings:
        features = _Features(window_s, horizon_s)
        moments = list(moments_of(samples, features))
        seen += [
            (moment.at, row, moment.came)
            for moment, row in zip(moments, features.rows, strict=True) if moment.came is not None
        ]  # fmt: skip
    seen.sort(key=lambda one: one[0])
    split = seen[int(len(seen) * TRAINED_ON)][0] if seen else 0.0
    # What would be known of the moments right before the split came after it.
    early = [one for one in seen if one[0] + horizon_s < split]
    came = np.array([one[2] for one in early], dtype=bool)
    if not early or came.all() or not came.any():
        raise UsageError(
            f"there is nothing to learn: of {len(early):,} early moments, {int(came.sum()):,} lie within "
            f"{horizon_s:g} s before a fault",
            hint=_RECORD,
        )
    names, table = _table([one[1] for one in early])
    fill = np.nanmedian(table, axis=0)
    table = np.where(np.isnan(table), fill, table)
    empty = Model(kind, horizon_s, window_s, 0.5, names, fill.tolist(), 0.0)
    model = (_logistic if kind == "logistic" else _boosted)(empty, table, came)
    known = {"moments": len(early), "before_a_fault": int(came.sum()), "since": early[0][0], "until": split}
    model = replace(model, trained=known)
    return replace(model, threshold=_threshold(model, recordings, split)), split


def _table(rows: Sequence[Mapping[str, float]]) -> tuple[list[str], np.ndarray]:
    """Returns the names of features that differ among rows, and the rows as a table with NaN for what is not known."""
    names = sorted({name for row in rows for name in row})
    table = np.array([[row.get(name, math.nan) for name in names] for row in rows])
    differ = np.nanmin(table, axis=0) != np.nanmax(table, axis=0)
    return [name for name, one in zip(names, differ, strict=True) if one], table[:, differ]


def _logistic(empty: Model, table: np.ndarray, came: np.ndarray) -> Model:
    from sklearn.linear_model import LogisticRegression

    mean, scale = table.mean(axis=0), table.std(axis=0)
    scale[scale == 0] = 1.0
    fitted = LogisticRegression(C=0.1, max_iter=1000).fit((table - mean) / scale, came)
    return replace(
        empty, intercept=float(fitted.intercept_[0]), mean=mean.tolist(), scale=scale.tolist(),
        coefficients=fitted.coef_[0].tolist(),
    )  # fmt: skip


def _boosted(empty: Model, table: np.ndarray, came: np.ndarray) -> Model:
    from sklearn.ensemble import GradientBoostingClassifier

    fitted = GradientBoostingClassifier(
        n_estimators=TREES, max_depth=DEPTH, learning_rate=0.1, min_samples_leaf=5, random_state=0
    ).fit(table, came)
    trees = [_tree(one.tree_, fitted.learning_rate) for one in fitted.estimators_[:, 0]]
    odds = math.log(came.mean() / (1 - came.mean()))
    return replace(empty, intercept=odds + sum(tree.value[0] for tree in trees), trees=tuple(trees))


def _tree(tree: Any, rate: float) -> Tree:
    """Returns a tree of scikit-learn. Its inner nodes hold means of another kind than its leaves, so each gets the
    weighted mean of the leaves below it."""
    left, right = tree.children_left.tolist(), tree.children_right.tolist()
    weight = tree.weighted_n_node_samples
    value = [float(one) * rate for one in tree.value[:, 0, 0]]
    for node in reversed(range(len(left))):  # children come after their parents
        if left[node] >= 0:
            a, b = left[node], right[node]
            value[node] = float((value[a] * weight[a] + value[b] * weight[b]) / (weight[a] + weight[b]))
    feature = [int(place) if left[node] >= 0 else -1 for node, place in enumerate(tree.feature)]
    return Tree(feature, tree.threshold.tolist(), left, right, value)


class _Scored:
    """States what a model stated before, without asking it again."""

    def __init__(self, risks: Iterable[Risk], threshold: float) -> None:
        self._risks, self.threshold = iter(risks), threshold

    def take(self, sample: Sample) -> None:
        pass

    def risk(self, now: float) -> Risk:
        return next(self._risks)


def _threshold(model: Model, recordings: Sequence[Sequence[Sample]], split: float) -> float:
    """Returns the threshold whose alarms did best before the split, by the harmonic mean of precision and recall."""
    early = [[sample for sample in samples if sample.at < split] for samples in recordings]
    stated = [[one.risk for one in moments_of(samples, ModelScorer(model))] for samples in early]

    def worth(threshold: float) -> float:
        again = iter(stated)
        found = evaluate(early, lambda: _Scored(next(again), threshold))
        return 2 * found.right / (found.alarms + found.faults) if found.faults else 0.0

    return max(THRESHOLDS, key=worth)
