"""The features of a window are those of the points in it, however many have come before."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest

from tenuto.supervisor.detectors.contract import Sample
from tenuto.supervisor.risk.windows import POINTS, Windows


@pytest.mark.parametrize("window_s", [40.0, 5000.0])
def test_they_are_those_of_the_newest_points_within_it(window_s: float) -> None:
    source = random.Random(3)
    windows, points, at = Windows(window_s), deque[tuple[float, float]](maxlen=POINTS), 0.0
    for number in range(5 * POINTS):
        at += source.choice([0.5, 3.0, 60.0 if not number % 97 else 1.0])
        value = source.gauss(10, 3)
        windows.take(Sample(at, "memory", {"0.used": value}))
        points.append((at, value))
        if number % 7:
            continue
        found = windows.features(at)
        times, values = np.array([one for one in points if one[0] >= at - window_s]).T
        assert found["memory.used.last"] == values[-1] and found["memory.used.max"] == values.max()
        assert found["memory.used.rise"] == values[-1] - values[0]
        slope = np.polyfit(times - times[0], values, 1)[0] * 60 if len(times) > 1 else 0.0
        assert found["memory.used.slope"] == pytest.approx(slope, rel=1e-6, abs=1e-6)
