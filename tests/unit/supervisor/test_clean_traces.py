"""False alarms: telemetry of machines on which nothing goes wrong restarts and stops nothing."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from support.traces import merged, recorded, trace
from tenuto.supervisor.actions import TABLE
from tenuto.supervisor.detectors.contract import STEPS, Sample
from tenuto.supervisor.detectors.gpu import Gpu
from tenuto.supervisor.detectors.registry import detectors

GIB = float(1 << 30)
HOUR_S = 3600.0
TRACES = Path(__file__).parent / "traces"
RECORDED, ON_A_GPU = TRACES / "two-cores.jsonl.gz", TRACES / "h100.jsonl.gz"


def actions(samples: Iterable[Sample]) -> dict[str, int]:
    """How often each finding but those that are only noted comes up, of all detectors together."""
    watched, found = detectors("off"), dict[str, int]()
    for sample in samples:
        for detector in watched:
            for one in detector.judge(sample):
                if TABLE[one.name] != "note":
                    found[one.name] = found.get(one.name, 0) + 1
    return found


def quiet(seed: int, hours: float) -> list[Sample]:
    """A job of eight ranks on a machine with noise: memory that loaders and caches take and give back, disks that saves
    fill and retention empties, a save now and then and an evaluation each hour, hot devices, a few lost packets, a
    clock that NTP slews, a service without notices."""
    source = random.Random(seed)
    noise = source.gauss
    pace, host, save_bytes = source.uniform(0.2, 8), source.choice([64, 512, 2048]) * GIB, source.uniform(5, 200) * GIB
    disk = save_bytes * source.uniform(30, 80)
    degrees, wall = source.uniform(55, 84), source.uniform(-400e-6, 400e-6)

    def memory(at: float) -> dict[str, float]:
        used = 0.55 + 0.15 * min(at / 300, 1) + 0.01 * noise(0, 1) + (0.1 if at % HOUR_S < 300 else 0)
        stalled = max(noise(0, 2), 0)
        return {"host_available_bytes": (1 - min(used, 0.97)) * host, "host_total_bytes": host,
                "psi_some_avg10": stalled, "psi_full_avg10": stalled / 2}  # fmt: skip

    def steps(at: float) -> dict[str, float]:
        slower = 1.4 if at % HOUR_S < 300 else 1.15 if at % 900 < 30 else 1
        ranks = [pace * slower * max(1 + noise(0, 0.05), 0.6) for _ in range(8)]
        saves = int(at // 600)
        found: dict[str, Any] = {"ranks": 8, "step": int(at / pace), "saves": saves, "step_s": max(ranks)}
        found |= {f"{rank}.step_s": one for rank, one in enumerate(ranks)}
        return found | ({"save_s": 30 * max(1 + noise(0, 0.2), 0.5), "save_bytes": save_bytes} if saves else {})

    def places(at: float) -> dict[str, float]:
        kept = min(at // 600, 4) + (at % 600) / 600
        return {"/ck.free_bytes": disk - save_bytes * (3 + kept), "/ck.total_bytes": disk, "/ck.free_inodes": 1e8,
                "/ck.write_s": abs(noise(0.004, 0.01)) + (3.0 if source.random() < 0.002 else 0)}  # fmt: skip

    def gpus(at: float) -> dict[str, float]:
        found = {}
        for index in range(8):
            found |= {
                f"{index}.temperature": degrees + noise(0, 2), f"{index}.slowdown_temperature": 95.0,
                f"{index}.throttled": 4.0 if source.random() < 0.5 else 0.0, f"{index}.ecc_uncorrectable": 0.0,
                f"{index}.memory_free_bytes": 1.2 * GIB, f"{index}.memory_total_bytes": 80 * GIB,
            }  # fmt: skip
        return found

    def network(at: float) -> dict[str, float]:
        return {"eth0.rx_packets": at * 5e4, "eth0.tx_packets": at * 5e4, "eth0.rx_errors": at // 1000,
                "eth0.rx_dropped": at * 2, "mlx5_0/1.symbol_error": at // 500}  # fmt: skip

    lasts_s = hours * HOUR_S
    return merged(
        trace("memory", memory, period_s=5, lasts_s=lasts_s),
        trace(STEPS, steps, period_s=5, lasts_s=lasts_s),
        trace("disk", places, period_s=30, lasts_s=lasts_s),
        trace("gpu", gpus, period_s=10, lasts_s=lasts_s),
        trace("network", network, period_s=10, lasts_s=lasts_s),
        trace("clock", lambda at: {"wall_s": at * wall, "suspended_s": 0.0}, period_s=5, lasts_s=lasts_s),
        trace("preemption", lambda at: {"aws.answers": float(at % 1000 > 5)}, period_s=5, lasts_s=lasts_s),
    )


@pytest.mark.parametrize("seed", range(3))
def test_hours_on_machines_with_noise_restart_and_stop_nothing_and_warn_of_nothing(seed: int) -> None:
    assert actions(quiet(seed, hours=4)) == {}


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3, 13))
def test_a_hundred_hours_restart_and_stop_nothing_and_warn_of_nothing(seed: int) -> None:
    assert actions(quiet(seed, hours=10)) == {}


def test_an_hour_that_was_recorded_on_a_busy_machine_has_no_finding() -> None:
    """Two cores, under a load of up to 25, while a training made 19,000 steps."""
    found = list(recorded(RECORDED))
    assert found[-1].at - found[0].at > HOUR_S and {"memory", "disk", "network", "clock", STEPS} <= {
        one.source for one in found
    }
    assert actions(found) == {}


def test_minutes_on_a_gpu_under_full_load_have_no_finding_but_the_error_of_another_program() -> None:
    """One H100 at 70 degrees, beside a program whose kernel read out of bounds, once (Xid 43): nobody is restarted."""
    found = list(recorded(ON_A_GPU))
    assert found[-1].at - found[0].at > 400 and sum(one.source == "gpu" for one in found) > 40
    assert actions(found) == {}
    (said,) = [one for sample in found for one in Gpu().judge(sample)]
    assert (said.name, said.evidence) == ("gpu-error", "GPU 0 reports Xid 43")
