"""Which metrics the policies of a training watch: one that nothing logs is said to whoever wrote the policy."""

from __future__ import annotations

from collections.abc import Mapping

from tenuto.policy.keep import KeepPolicy, Union
from tenuto.policy.save import AnyOf, SavePolicy


def watched(save: SavePolicy, keep: KeepPolicy) -> Mapping[str, str]:
    """Each metric that a policy goes by, by name, and the policies that do, as they are written."""
    found: dict[str, list[str]] = {}
    parts: list[SavePolicy | KeepPolicy] = [*(save.parts if isinstance(save, AnyOf) else (save,))]
    parts += keep.parts if isinstance(keep, Union) else (keep,)
    for part in parts:
        for metric in part.metrics():
            found.setdefault(metric, []).append(repr(part))
    return {metric: " and ".join(found[metric]) for metric in sorted(found)}
