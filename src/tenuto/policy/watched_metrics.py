"""Finds the metrics that a training's policies read, so that one nobody logs can be reported."""

from __future__ import annotations

from collections.abc import Mapping

from tenuto.policy.keep import KeepPolicy, Union
from tenuto.policy.save import AnyOf, SavePolicy


def watched(save: SavePolicy, keep: KeepPolicy) -> Mapping[str, str]:
    """Returns each metric that a policy reads, with the policies that do, as the user wrote them."""
    found: dict[str, list[str]] = {}
    parts: list[SavePolicy | KeepPolicy] = [*(save.parts if isinstance(save, AnyOf) else (save,))]
    parts += keep.parts if isinstance(keep, Union) else (keep,)
    for part in parts:
        for metric in part.metrics():
            found.setdefault(metric, []).append(repr(part))
    return {metric: " and ".join(found[metric]) for metric in sorted(found)}
