"""Where the time of a save has gone on each rank, told with its receipts and put together by the coordinator."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.engine.handle import Save
from holdfast.engine.job import About
from holdfast.model.spread import RankTimings
from holdfast.model.timing import Timing


def own_timing(save: Save) -> dict[str, Any]:
    """What this rank tells, in its writing thread, when its part is durable."""
    save.clock.read_cpu()
    took = time.monotonic() - save.begun_s if save.begun_s is not None else 0.0
    return {**replace(save.timing, seconds=took).told(), "bytes": save.bytes}


def timings_of(told: Sequence[Mapping[str, Any]]) -> RankTimings:
    """On the coordinator: of all ranks, `told[r]` by rank r."""
    return RankTimings.of([Timing.read(one, int(one.get("bytes", 0))) or Timing() for one in told])


def spread_over(about: About, timings: RankTimings) -> About:
    """`about`, whose timing is the coordinator's own, with that of each rank beside it."""
    timing = dict(about.environment.get("timing") or {})
    return replace(about, environment={**about.environment, "timing": {**timing, "ranks": timings.told()}})
