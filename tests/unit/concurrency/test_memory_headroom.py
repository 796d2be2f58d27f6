import os
from pathlib import Path

import pytest

from tenuto.concurrency import memory_headroom as headroom
from tenuto.engine.staging.arena import file_system_headroom

GIB = 1 << 30


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Describes control groups and the machine by files."""
    files: dict[str, Path] = {}

    def describe(name: str, text: str) -> None:
        path = tmp_path / name.strip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        files[name] = path

    real = headroom._lines
    monkeypatch.setattr(headroom, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(headroom, "_lines", lambda path: real(files.get(str(path), path)))
    describe("/proc/meminfo", f"MemTotal: 99999999 kB\nMemAvailable: {64 * GIB // 1024} kB\n")
    describe("/proc/self/cgroup", "")
    return describe


def test_the_machine_alone(machine) -> None:
    assert headroom.memory_headroom() == 64 * GIB


def test_version_2_counts_droppable_cache_as_free_and_takes_the_tightest_ancestor(machine) -> None:
    machine("/proc/self/cgroup", "0::/job/trainer\n")
    machine("cgroup/job/trainer/memory.max", "max\n")
    machine("cgroup/job/trainer/memory.current", f"{5 * GIB}\n")
    machine("cgroup/job/memory.max", f"{8 * GIB}\n")
    machine("cgroup/job/memory.current", f"{7 * GIB}\n")
    machine("cgroup/job/memory.stat", f"anon {4 * GIB}\ninactive_file {2 * GIB}\nactive_file {GIB // 2}\n")
    assert headroom.memory_headroom() == 3 * GIB + GIB // 2


def test_version_1_has_its_own_names_and_its_own_infinity(machine) -> None:
    machine("/proc/self/cgroup", "11:cpu,cpuacct:/\n5:memory:/docker/abc\n")
    machine("cgroup/memory/memory.limit_in_bytes", f"{2**63 - 4096}\n")
    machine("cgroup/memory/memory.usage_in_bytes", f"{GIB}\n")
    machine("cgroup/memory/docker/abc/memory.limit_in_bytes", f"{4 * GIB}\n")
    machine("cgroup/memory/docker/abc/memory.usage_in_bytes", f"{3 * GIB}\n")
    machine("cgroup/memory/docker/abc/memory.stat", f"total_inactive_file {GIB}\ninactive_file 1\n")
    assert headroom.memory_headroom() == 2 * GIB


def test_in_a_container_the_mounts_root_is_its_group(machine) -> None:
    machine("/proc/self/cgroup", "0::/../../host/path\n")
    machine("cgroup/memory.max", f"{2 * GIB}\n")
    machine("cgroup/memory.current", f"{3 * GIB}\n")
    assert headroom.memory_headroom() == 0


def test_kills_are_counted_in_the_own_group_of_either_version(machine) -> None:
    machine("/proc/self/cgroup", "0::/job\n")
    machine("cgroup/job/memory.events", "low 0\noom 4\noom_kill 3\n")
    machine("cgroup/memory.events", "oom_kill 99\n")
    assert headroom.memory_kills() == 3
    machine("/proc/self/cgroup", "4:memory:/job\n0::/\n")
    machine("cgroup/memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert headroom.memory_kills() == 2
    machine("/proc/self/cgroup", "")
    assert headroom.memory_kills() == 0


def test_nobody_knows(machine) -> None:
    machine("/proc/meminfo", "")
    assert headroom.memory_headroom() is None


def test_of_a_file_system(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    assert file_system_headroom(descriptor) > 0
    os.close(descriptor)
