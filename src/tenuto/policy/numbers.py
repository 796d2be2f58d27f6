"""Validates the numbers and names given to a policy."""

from __future__ import annotations

import math
import operator
import re
from typing import Final, Literal, SupportsIndex, cast

from tenuto.errors import UsageError
from tenuto.record import record


def whole_number(value: object, call: str) -> int:
    """Returns `value` as a positive int. `call` shows how the user wrote it, with {} in place of the value."""
    hint = f"give a whole number of at least 1, such as {call.format(3)}"
    if isinstance(value, bool):
        raise UsageError(f"{call.format(repr(value))} is not a count", hint=hint)
    try:
        number = operator.index(cast("SupportsIndex", value))
    except TypeError:
        raise UsageError(f"{call.format(repr(value))} is not a whole number", hint=hint) from None
    if number < 1:
        raise UsageError(f"{call.format(repr(value))} would never be reached", hint=hint)
    return number


def duration(value: object, call: str) -> float:
    """Returns `value` as a positive, finite number of any unit."""
    hint = f"give a number above zero, such as {call.format(10)}"
    if isinstance(value, (bool, str, bytes)):
        raise UsageError(f"{call.format(repr(value))} is not a duration", hint=hint)
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{call.format(repr(value))} is not a duration", hint=hint) from None
    if not math.isfinite(number) or number <= 0:
        raise UsageError(f"{call.format(repr(value))} is not a duration that can pass", hint=hint)
    return number


@record
class Margin:
    """How much a metric must change: an amount, or (`relative`) a fraction of the value it is compared with."""

    amount: float
    relative: bool = False

    def at(self, value: float) -> float:
        """Returns the required amount, compared with `value`."""
        return self.amount * abs(value) if self.relative and self.amount else self.amount

    def reached(self, change: float, value: float) -> bool:
        """Returns whether `change`, measured from `value`, is positive and at least this margin, up to rounding."""
        least = self.at(value)
        return change > 0 and (change >= least or math.isclose(change, least, rel_tol=1e-9))

    def __repr__(self) -> str:
        return f"'{self.amount * 100:g}%'" if self.relative else f"{self.amount:g}"


def margin(value: object, call: str, *, least: Literal["zero", "above zero"]) -> Margin:
    """Returns `value`, a finite number or a string such as "5%", as a margin. Raises UsageError below zero, or at it
    (`least`)."""
    hint = f"give a number, such as {call.format(0.01)}, or a part of the value, such as {call.format(repr('5%'))}"
    number, relative = value, False
    if isinstance(value, str) and value.strip().endswith("%"):
        number, relative = value.strip()[:-1], True
    if isinstance(value, (bool, bytes)) or (isinstance(value, str) and not relative):
        raise UsageError(f"{call.format(repr(value))} is not a margin", hint=hint)
    try:
        amount = float(number) / (100 if relative else 1)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{call.format(repr(value))} is not a margin", hint=hint) from None
    if not math.isfinite(amount) or amount < 0 or (least == "above zero" and amount == 0):
        raise UsageError(f"{call.format(repr(value))} is not a margin that a metric can pass", hint=hint)
    return Margin(amount, relative)


def metric_name(value: object, call: str) -> str:
    """Returns `value` as a metric's name. `call` shows how a user writes it."""
    if not isinstance(value, str) or not value:
        raise UsageError(f"{value!r} names no metric", hint=f"give the name that `log` is given: {call}")
    return value


_LOWER: Final = re.compile(
    r"loss(es)?|err(or)?s?|r?mse|mae|mape|perplexity|ppl|nll|bp[bc]|[wct]er|eer|fid|kld?|lpips", re.ASCII
)
"""Words in names of metrics of which less is better, whatever else the name says."""
_HIGHER: Final = re.compile(
    r"acc(uracy)?|f1|au(c|roc|prc)|m?ap|bleu|chrf|rouge[ln]?|meteor|cider|m?iou|jaccard|dice|r2|rewards?|returns?|"
    r"precision|recall|sensitivity|specificity|psnr|ssim|ndcg|mrr|mcc|kappa|pearson|spearman",
    re.ASCII,
)
"""Words in names of metrics that everybody reads as: more is better."""
_CAMEL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_WORD: Final = re.compile(r"[a-z0-9]+")


def direction_of(metric: str) -> Literal["min", "max"] | None:
    """Returns in which direction a metric improves, as the words of its name say; None where they do not."""
    words = [*_WORD.findall(metric.lower()), *_WORD.findall(_CAMEL.sub(" ", metric).lower())]
    words += [word.rstrip("0123456789") for word in words]
    if any(map(_LOWER.fullmatch, words)):
        return "min"
    return "max" if any(map(_HIGHER.fullmatch, words)) else None


def line_on_direction(metric: str) -> str:
    """Returns in one line that more is better, where the name alone says so."""
    return f'{metric}: the highest is the best, as its name says; mode="min" where the lowest is'


def min_or_max(value: object, metric: str) -> Literal["min", "max"]:
    """Returns `value` as the direction in which a metric improves."""
    if value == "min":
        return "min"
    if value == "max":
        return "max"
    raise UsageError(
        f"mode={value!r} is neither 'min' nor 'max'",
        subject=metric,
        hint="'min': the lowest is the best (a loss); 'max': the highest is (an accuracy)",
    )
