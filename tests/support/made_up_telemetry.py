"""Recordings of trainings that do not exist: memory that leaks before a fault, and faults that nothing comes before."""

from __future__ import annotations

import random

from tenuto.supervisor.detectors.contract import END, STEPS, Sample

GIB = float(1 << 30)


def recording(
    seed: int, *, faults: int = 12, leaking: float = 0.8, noise: float = 0.3, save_s: float = 2.0
) -> list[Sample]:
    """One job: it runs for half an hour to two, ends by a fault, and starts again; of so many faults a share comes with
    ten minutes of growing memory before it. Saves every ten minutes."""
    source, at, found = random.Random(seed), 1_700_000_000.0, []
    for _ in range(faults):
        fault, leaks = at + source.uniform(1800, 7200), source.random() < leaking
        began = at
        while at < fault:
            used = 10 + noise * source.gauss(0, 1)
            if leaks and fault - at < 600:
                used += (600 - (fault - at)) / 600 * 28
            memory = {"host_available_bytes": (40 - used) * GIB, "host_total_bytes": 40 * GIB}
            found.append(Sample(at, "memory", memory))
            found.append(Sample(at, "gpu", {"0.temperature": source.uniform(60, 70), "1.temperature": 75.0}))
            saves = float((at - began) // 600)
            found.append(Sample(at, STEPS, {"step": at - began, "saves": saves, "save_s": save_s}))
            at += 15
        found.append(Sample(fault, END, {}, "out of memory" if leaks else "killed"))
        at = fault + 60
    return found
