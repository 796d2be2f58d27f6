"""What detectors make of traces of samples: what is to be found, when, and what is not."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.traces import judged, merged, named, trace
from tenuto.supervisor.detectors import clock, disk, memory, network
from tenuto.supervisor.detectors.clock import Clock
from tenuto.supervisor.detectors.contract import END, STEPS, Sample
from tenuto.supervisor.detectors.disk import Disk, directory_of
from tenuto.supervisor.detectors.memory import Memory
from tenuto.supervisor.detectors.network import Network
from tenuto.supervisor.detectors.steps import StepTimes
from tenuto.supervisor.detectors.trend import Trend

GIB = float(1 << 30)


def test_a_sample_survives_its_line_and_anything_else_is_refused() -> None:
    sample = Sample(1.25, END, {"a.b": 2.0}, "killed")
    assert sample.line() == '{"at": 1.25, "source": "end", "values": {"a.b": 2.0}, "kind": "killed"}'
    assert Sample.read(sample.line()) == sample
    assert Sample(1.0, "gpu", {"/x.y/z.free": 1.0, "all": 2.0}).by_thing() == {"/x.y/z": {"free": 1.0}}
    for line in ("", "[]", '{"at": 1, "source": "x"}', '{"at": 1, "source": "x", "values": {"a": NaN}}', '{"at": "x"}'):
        with pytest.raises(ValueError):
            Sample.read(line)


def test_a_trend_is_a_steady_fall_and_neither_a_step_nor_a_return() -> None:
    def left_s(value: Callable[[float], float]) -> float | None:
        trend = Trend(100.0)
        for at in range(150):
            trend.add(at, value(at))
        return trend.left_s()

    assert left_s(lambda at: 2000.0 - 10 * at) == pytest.approx(51.0)
    assert left_s(lambda at: 2000.0 - 10 * at + 30 * jitter(at, 0)) == pytest.approx(54.0, rel=0.05)
    for level in (
        lambda at: 500.0,
        lambda at: 500.0 + at,
        lambda at: 900.0 - 600 * (at > 99),
        lambda at: 100.0 * jitter(at, 1),
    ):
        assert left_s(level) is None
    assert left_s(lambda at: 900.0 - 600 * (60 < at < 140)) is None


# -- memory


def memory_of(available: float, total: float = 64 * GIB, **more: float) -> dict[str, float]:
    return {"host_available_bytes": max(available, 0.0), "host_total_bytes": total, **more}


def test_memory_that_a_leak_uses_up_is_found_in_time_for_a_save() -> None:
    leak = trace("memory", lambda at: memory_of(32 * GIB - at * GIB / 10), period_s=5, lasts_s=320)
    found = judged(Memory(), leak)
    first_s, first = found[0]
    assert first.name == "memory" and "as it goes" in first.evidence
    assert 320 - 125 <= first_s <= 320 - 60, "between two minutes and one before the end"
    assert first.grace_s == pytest.approx(320 - first_s, rel=0.1)


def test_memory_that_is_nearly_used_up_is_found_without_any_trend() -> None:
    found = judged(Memory(), trace("memory", lambda at: memory_of(0.5 * GIB), period_s=5, lasts_s=30))
    assert next(at for at, _ in found) == 5 and "512 MiB of 64.0 GiB left" in found[0][1].evidence


def test_the_control_group_counts_where_it_has_less() -> None:
    group = {"cgroup_total_bytes": 8 * GIB}
    samples = trace(
        "memory",
        lambda at: {**memory_of(60 * GIB), **group, "cgroup_available_bytes": 0.1 * GIB},
        period_s=5,
        lasts_s=30,
    )
    assert {one.subject for _, one in judged(Memory(), samples)} == {"the control group"}


def test_where_nothing_runs_for_want_of_memory_that_is_found() -> None:
    thrashing = trace("memory", lambda at: memory_of(9 * GIB, psi_full_avg10=40.0 * (at > 60)), period_s=5, lasts_s=90)
    found = judged(Memory(), thrashing)
    assert found[0][0] == 75 and "40 % of the time" in found[0][1].evidence


def test_a_training_that_takes_its_memory_and_keeps_it_is_no_finding() -> None:
    filling = trace("memory", lambda at: memory_of(max(60 - at, 20) * GIB), period_s=5, lasts_s=600)
    breathing = trace("memory", lambda at: memory_of((12 + 3 * math.sin(at / 40)) * GIB), period_s=5, lasts_s=3600)
    assert not judged(Memory(), filling) and not judged(Memory(), breathing)


def test_memory_is_read_here() -> None:
    values = Memory().sample()
    assert values is not None and 0 < values["host_available_bytes"] < values["host_total_bytes"]


def test_pressure_is_read_where_the_kernel_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory").write_text(
        "some avg10=1.50 avg60=0.00 avg300=0.00 total=1\nfull avg10=0.25 avg60=0.00 avg300=0.00 total=0\n"
    )
    monkeypatch.setattr(memory, "PRESSURE", tmp_path / "memory")
    values = Memory().sample()
    assert values is not None and (values["psi_some_avg10"], values["psi_full_avg10"]) == (1.5, 0.25)
    monkeypatch.setattr(memory, "PRESSURE", tmp_path / "none")
    assert "psi_some_avg10" not in (Memory().sample() or {})


# -- disks


def disk_of(free: float, total: float = 1000 * GIB, **more: float) -> dict[str, float]:
    values = {"free_bytes": max(free, 0.0), "total_bytes": total, "free_inodes": 1e7, "write_s": 0.002, **more}
    return {f"/ckpts.{name}": value for name, value in values.items()}


def saves_of(number: float, took_s: float = 10.0, nbytes: float = 50 * GIB) -> dict[str, float]:
    return {"ranks": 1, "step": 1, "saves": int(number), "save_s": took_s, "save_bytes": nbytes}


def test_a_disk_that_has_no_room_for_another_save_is_found() -> None:
    saves = trace(STEPS, lambda at: saves_of(1 + at // 300), period_s=5, lasts_s=3000)
    filling = trace("disk", lambda at: disk_of(400 * GIB - at // 300 * 50 * GIB), period_s=30, lasts_s=3000)
    found = judged(Disk(), merged(saves, filling))
    assert found[0][0] < 2100 and "as it goes" in found[0][1].evidence, "the trend shows it before"
    full = next((at, one) for at, one in found if "a save takes" in one.evidence)
    assert full[0] == 2100 and "has 50.0 GiB free, and a save takes 50.0 GiB" in full[1].evidence


def test_a_disk_that_fills_is_found_half_an_hour_before_and_one_that_retention_empties_is_not() -> None:
    filling = trace("disk", lambda at: disk_of(200 * GIB - at * GIB / 36), period_s=30, lasts_s=7200)
    (first_s, first), *_ = judged(Disk(), filling)
    assert first.name == "disk-filling" and 7200 - 1800 <= first_s <= 7200 - 1500
    kept = trace("disk", lambda at: disk_of(190 * GIB - at % 300 / 3 * GIB), period_s=30, lasts_s=36_000)
    assert not judged(Disk(), kept)


def test_a_disk_that_is_read_only_fails_or_has_no_inodes_is_found() -> None:
    fails = trace("disk", lambda at: disk_of(500 * GIB, errno=errno.EROFS), period_s=30, lasts_s=60)
    assert judged(Disk(), fails)[0][1].evidence == "/ckpts cannot be written: read-only file system"
    assert named(Disk(), trace("disk", lambda at: disk_of(1e12, free_inodes=9), period_s=30, lasts_s=60)) == [
        "disk-filling"
    ]


def test_a_disk_that_is_slow_or_does_not_answer_is_found() -> None:
    slow = trace("disk", lambda at: disk_of(1e12, write_s=9.0 if at > 600 else 0.01), period_s=30, lasts_s=900)
    assert next(at for at, _ in judged(Disk(), slow)) == 690
    once = trace("disk", lambda at: disk_of(1e12, write_s=9.0 if at % 300 == 0 else 0.01), period_s=30, lasts_s=9000)
    assert not judged(Disk(), once)
    hung = merged(
        trace("disk", lambda at: disk_of(1e12), period_s=30, lasts_s=600),
        trace("clock", lambda at: {}, period_s=5, lasts_s=1200),
    )
    found = judged(Disk(), hung)
    assert found[0][0] == 570 + 180 and "has not answered for 3 min 00 s" in found[0][1].evidence


def test_saves_that_take_four_times_as_long_are_found() -> None:
    slow = trace(STEPS, lambda at: saves_of(1 + at // 300, 50.0 if at > 6000 else 10.0), period_s=5, lasts_s=7200)
    found = judged(Disk(), slow)
    assert next(one.evidence for _, one in found) == "saves take 50.0 s, usually 10.0 s" and found[0][0] > 6000


def test_a_disk_is_read_here(tmp_path: Path) -> None:
    detector = Disk()
    assert detector.sample() == {}
    detector.places = [str(tmp_path / "not" / "there")]
    values = Sample(0.0, "disk", detector.sample()).by_thing()[str(tmp_path / "not" / "there")]
    assert values["free_bytes"] > 0 and "errno" not in values and not list(tmp_path.iterdir())


def test_what_a_write_fails_with_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "full")

    detector = Disk()
    detector.places = [str(tmp_path)]
    monkeypatch.setattr(disk.os, "write", full)
    assert detector.sample()[f"{tmp_path}.errno"] == errno.ENOSPC


def test_only_places_on_a_file_system_have_a_directory() -> None:
    assert [directory_of(one) for one in ("/a/b", "file:///a%20b", "s3://bucket/x", "memory://m")] == [
        "/a/b", "/a b", None, None,
    ]  # fmt: skip


# -- network and clock


def counters(at: float, **each_s: float) -> dict[str, float]:
    usual = {"rx_packets": 1e4, "tx_packets": 1e4, "rx_errors": 0.0, "tx_errors": 0.0, "rx_dropped": 0.0}
    return {f"eth0.{name}": rate * at for name, rate in {**usual, **each_s}.items()}


def test_interfaces_with_many_errors_or_drops_are_found_and_those_with_few_are_not() -> None:
    def found(**each_s: float) -> list[str]:
        samples = trace("network", lambda at: counters(at, **each_s), period_s=10, lasts_s=120)
        return [one.evidence for _, one in judged(Network(), samples)]

    assert found(rx_errors=50.0)[0] == "eth0 has 500 errors in 10 s"
    assert found(rx_dropped=1000.0)[0] == "eth0 drops 5.0% of its packets"
    assert found(rx_errors=0.5, rx_dropped=20.0) == []


def test_a_port_whose_link_went_down_or_that_has_symbol_errors_is_found() -> None:
    down = trace("network", lambda at: {"mlx5_0/1.link_downed": float(at >= 60)}, period_s=10, lasts_s=120)
    assert [(at, one.evidence) for at, one in judged(Network(), down)] == [(60, "the link of mlx5_0/1 went down")]
    noisy = trace("network", lambda at: {"mlx5_0/1.symbol_error": at * 50}, period_s=10, lasts_s=120)
    assert named(Network(), noisy) == ["network"]


def test_counters_are_read_of_interfaces_and_ports_but_not_of_virtual_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, value in {
        "net/eth0/statistics/rx_errors": "3\n",
        "net/lo/statistics/rx_errors": "5\n",
        "net/veth1/statistics/rx_errors": "5\n",
        "ib/mlx5_0/ports/1/counters/link_downed": "2\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(value)
    monkeypatch.setattr(network, "INTERFACES", tmp_path / "net")
    monkeypatch.setattr(network, "INFINIBAND", tmp_path / "ib")
    assert Network().sample() == {"eth0.rx_errors": 3.0, "mlx5_0/1.link_downed": 2.0}


def test_a_clock_that_was_set_and_a_machine_that_stood_still_are_found() -> None:
    forward = trace("clock", lambda at: {"wall_s": 5.0 + 3600 * (at >= 50)}, period_s=5, lasts_s=100)
    assert [(at, one.evidence) for at, one in judged(Clock(), forward)] == [
        (50, "the clock was set forward by 1 h 00 min")
    ]
    slept = trace("clock", lambda at: {"suspended_s": 90.0 * (at >= 50), "wall_s": 0.0}, period_s=5, lasts_s=100)
    assert [one.evidence for _, one in judged(Clock(), slept)] == ["the machine was suspended for 1 min 30 s"]
    slewed = trace("clock", lambda at: {"wall_s": at * 0.0005}, period_s=5, lasts_s=36_000)
    assert not judged(Clock(), slewed)


def test_a_process_that_is_held_up_between_two_clocks_takes_none_for_set(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [300.0, 303.0, 303.0, 303.0]  # held up for 3 s after the first reading
    times = SimpleNamespace(
        time=lambda: 903.0,
        monotonic=lambda: now.pop(0),
        clock_gettime=lambda kind: 353.0,
    )
    monkeypatch.setattr(clock, "time", times)
    assert Clock().sample()["wall_s"] == 600.0 and not now


# -- steps


def paces(*ranks: float, **more: float) -> dict[str, float]:
    found = {f"{rank}.step_s": pace for rank, pace in enumerate(ranks)}
    return {"ranks": len(ranks), "step": 1, "saves": 0, "step_s": max(ranks), **found, **more}


def jitter(at: float, rank: int) -> float:
    return 1 + 0.04 * math.sin(at * 1.7 + rank * 2.3)


def test_a_rank_that_is_slower_all_the_time_is_found_and_one_that_is_now_and_then_is_not() -> None:
    def ranks(factor: float, when: float) -> list[str]:
        samples = trace(
            STEPS,
            lambda at: paces(
                *(jitter(at, rank) * (factor if rank == 5 and at % when == 0 else 1) for rank in range(8))
            ),
            period_s=5,
            lasts_s=300,
        )
        return [one.subject for _, one in judged(StepTimes(), samples)]

    assert set(ranks(1.5, 5)) == {"rank 5"}
    assert ranks(3.0, 25) == [] and ranks(1.1, 5) == []


def test_of_two_ranks_nobody_knows_which_one_is_slow() -> None:
    assert not judged(StepTimes(), trace(STEPS, lambda at: paces(1.0, 2.0), period_s=5, lasts_s=300))


def test_a_job_that_slows_down_is_found_and_the_next_start_is_judged_by_itself() -> None:
    slower = trace(STEPS, lambda at: paces(jitter(at, 0) * (2.0 if at > 600 else 1.0)), period_s=5, lasts_s=1200)
    found = judged(StepTimes(), slower)
    assert {one.name for _, one in found} == {"slow-steps"} and 660 < found[0][0] < 720
    assert found[-1][0] > 1100, "what is slow does not become usual"
    pause = trace(STEPS, lambda at: paces(jitter(at, 0) * (9.0 if at % 600 == 0 else 1.0)), period_s=5, lasts_s=36_000)
    assert not judged(StepTimes(), pause)
    detector = StepTimes()
    first = list(trace(STEPS, lambda at: paces(1.0), period_s=5, lasts_s=300))
    again = list(trace(STEPS, lambda at: paces(3.0), period_s=5, lasts_s=300))
    assert not judged(detector, [*first, Sample(first[-1].at, END, kind="killed"), *again])
