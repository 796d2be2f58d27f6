"""A learnt model of risk: a JSON file of numbers, evaluated by a few lines of numpy. A job needs no library that
trained it, and what is loaded can run nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from tenuto.errors import UsageError
from tenuto.record import record
from tenuto.supervisor.risk.windows import Features, in_words

FORMAT: Final = "tenuto risk model 1"
REASONS: Final = 3
"""Features that are named, of those that raise the risk most."""
_HINT: Final = "tenuto risk train TELEMETRY... -o model.json"


@record
class Risk:
    """The probability of a fault within the next `horizon_s` seconds, and what raises it, in words."""

    probability: float
    horizon_s: float
    reasons: tuple[str, ...] = ()


@record
class Tree:
    """A binary tree of decisions: at node i the feature `feature[i]` (-1: a leaf) goes to `left[i]` where it is at most
    `threshold[i]`, else to `right[i]`. value: what each node adds to the log odds, were it a leaf."""

    feature: Sequence[int]
    threshold: Sequence[float]
    left: Sequence[int]
    right: Sequence[int]
    value: Sequence[float]


@record
class Model:
    """kind: `logistic`, where `coefficients` weigh the features less `mean` over `scale`, or `trees`, whose values are
    added. intercept: the log odds with nothing added. fill: what stands for a feature that is not known. threshold: the
    probability that raises an alarm. trained: of how much, and from and until when."""

    kind: Literal["logistic", "trees"]
    horizon_s: float
    window_s: float
    threshold: float
    features: Sequence[str]
    fill: Sequence[float]
    intercept: float
    mean: Sequence[float] = ()
    scale: Sequence[float] = ()
    coefficients: Sequence[float] = ()
    trees: Sequence[Tree] = ()
    trained: Mapping[str, float] = field(default_factory=dict)

    def score(self, features: Features) -> Risk:
        """Returns the risk, and the features that raised it most: each by what it added to the log odds."""
        values = np.array([features.get(name, fill) for name, fill in zip(self.features, self.fill, strict=True)])
        added = self._linear(values) if self.kind == "logistic" else self._by_trees(values)
        odds = float(np.clip(self.intercept + added.sum(), -700, 700))
        order = [int(place) for place in np.argsort(-added)[:REASONS] if added[place] > 0.01]
        reasons = tuple(in_words(self.features[place], float(values[place])) for place in order)
        return Risk(1 / (1 + math.exp(-odds)), self.horizon_s, reasons)

    def _linear(self, values: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.array(self.coefficients) * (values - np.array(self.mean)) / np.array(self.scale)
        return found

    def _by_trees(self, values: np.ndarray) -> np.ndarray:
        """Each decision adds the difference between the node that it leads to and its own; together with the root,
        which belongs to no feature and is part of the intercept, that is the leaf's value."""
        added = np.zeros(len(self.features))
        for tree in self.trees:
            node = 0
            while (place := tree.feature[node]) >= 0:
                below = tree.left[node] if np.float32(values[place]) <= tree.threshold[node] else tree.right[node]
                added[place] += tree.value[below] - tree.value[node]
                node = below
        return added

    def text(self) -> str:
        """Returns the model file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)


def load(path: Path) -> Model:
    """Returns the model of a file. Raises UsageError for one that is not there, or holds anything else."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        if found.pop("format") != FORMAT or found["kind"] not in ("logistic", "trees"):
            raise ValueError("it is of another kind")
        model = Model(**{**found, "trees": tuple(Tree(**tree) for tree in found["trees"])})
        _check(model)
        return model
    except OSError as error:
        why: Any = error.strerror
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        why = f"it holds no model of risk ({error})"
    raise UsageError(f"{path} cannot be read: {why}", subject=str(path), hint=_HINT)


def _check(model: Model) -> None:
    """Raises ValueError for a model that cannot be evaluated, or never ends."""
    many = len(model.features)
    columns = (model.fill, model.mean, model.scale, model.coefficients)
    numbers = [*columns[0], *columns[1], *columns[2], *columns[3], model.intercept, model.threshold]
    if not all(map(math.isfinite, [*numbers, model.horizon_s, model.window_s])):
        raise ValueError("numbers are missing")
    if any(len(column) != many for column in (columns if model.kind == "logistic" else columns[:1])):
        raise ValueError("columns differ in length")
    if not (0 < model.threshold <= 1 and model.horizon_s > 0 and model.window_s > 0 and 0 not in model.scale):
        raise ValueError("numbers make no sense")
    for tree in model.trees:
        nodes = len(tree.feature)
        for node, place in enumerate(tree.feature):
            below = (tree.left[node], tree.right[node])
            if place >= many or (place >= 0 and not all(node < one < nodes for one in below)):
                raise ValueError("a tree leads nowhere")
        if not len(tree.threshold) == len(tree.value) == nodes or not all(map(math.isfinite, tree.value)):
            raise ValueError("columns differ in length, or numbers are missing")
