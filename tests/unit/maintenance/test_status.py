"""What is whole where, and what goes on after which failure."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from tenuto import Tier, Tiers, every, keep
from tenuto.maintenance import status as module
from tenuto.maintenance.status import Status, file_system, is_network, status
from tenuto.repo.repository import Repo
from tenuto.store import probes
from tenuto.store.registry import open_store

pytestmark = pytest.mark.filterwarnings("ignore")


def save(where: Any, step: int) -> None:
    tenuto.save({"w": np.full(1000, float(step))}, where, step=step)


def look(where: Path, **more: Any) -> Status:
    return status(Repo.open(open_store(where)), **more)


def survivors(found: Status) -> dict[str, int | None]:
    return {one.failure: one.id.step if one.id else None for one in found.runs[0].recovery}


def shared(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """Has these lie on a network file system."""
    monkeypatch.setattr(module, "file_system", lambda url: "nfs4" if url in map(str, paths) else "ext4")


def test_a_failure_costs_what_lies_only_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest on this node's disk, the one before it on a shared file system, an older one in a copy."""
    source, mirror, copy = tmp_path / "source", tmp_path / "mirror", tmp_path / "copy"
    shared(monkeypatch, mirror, copy)
    declared = tenuto.Mirror(source, mirror, copies=1)
    save(declared, 10)
    tenuto.Repository(source).replicate(copy)
    save(declared, 20)
    save(declared, 30)
    next((mirror / "runs/main/a0001/step-00000030").glob("*.safetensors")).unlink()
    found = look(source, rates={str(mirror): 4000.0})
    assert [place.kind for place in found.places] == ["primary", "location", "copy"]
    assert survivors(found) == {"process": 30, "node": 20, "site": 10}
    run = found.runs[0]
    assert run.behind == (0, 1, 2)
    assert [row.places for row in run.spread] == [("whole", "", ""), ("whole", "whole", ""), ("whole",) * 3]
    node = run.recovery[1]
    assert (node.source, node.steps) == (str(mirror), 10)
    assert node.seconds == node.bytes / 4000.0 and run.recovery[2].seconds is None
    assert tenuto.Repository(source).status().runs[0].behind == run.behind


def test_tiers_are_shown_with_what_they_survive_and_how_far_they_are_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, primary, slow = tmp_path / "fast", tmp_path / "primary", tmp_path / "slow"
    shared(monkeypatch, primary)
    where = Tiers(
        Tier(fast, name="fast", per_node=True, keep=keep.latest(2)), Tier(primary), Tier(slow, save=every(steps=2))
    )
    with tenuto.Checkpointer(where, {"w": np.zeros(1000)}, save=every(steps=1), data=None) as ckpt:
        for _ in ckpt.steps(5):
            ckpt.wait()
    found = look(primary)
    assert [(place.url, place.kind) for place in found.places] == [
        (str(primary), "primary"),
        (str(slow), "tier"),
        (str(fast), "node"),
    ]
    assert found.runs[0].behind == (0, 1, 0)
    assert survivors(found) == {"process": 5, "node": 5, "site": None}
    assert [place.kind for place in look(slow).places] == ["tier"]
    done = subprocess.run(
        [sys.executable, "-m", "tenuto", "status", str(primary)], capture_output=True, text=True, timeout=120
    )
    lines = done.stdout.replace(str(tmp_path), "/data").splitlines()
    assert lines[1] == "2  /data/slow (tier, on this node)"
    assert any(line.split() == ["in", "step", "1", "behind", "in", "step"] for line in lines)
    assert len(lines) <= 25 and max(map(len, lines)) <= 80


def test_a_kept_probe_tells_how_long_reading_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save(tmp_path / "ckpts", 10)
    assert look(tmp_path / "ckpts").runs[0].recovery[0].seconds is None
    probes.keep(str(tmp_path / "ckpts"), {"cells": [{"get": 1000.0}, {"get": 4000.0}, {"get": float("inf")}]})
    process = look(tmp_path / "ckpts").runs[0].recovery[0]
    assert process.seconds == process.bytes / 4000.0
    for cells in (None, 3, [], [1, {"get": "fast"}, {"get": -1.0}, {}]):
        probes.keep(str(tmp_path / "ckpts"), {"cells": cells})
        assert look(tmp_path / "ckpts").runs[0].recovery[0].seconds is None


def test_a_tier_that_is_filled_in_the_background_counts_also_for_what_only_it_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    shared(monkeypatch, slow)
    where = tenuto.Tiers(tenuto.Tier(fast), tenuto.Tier(slow, save=tenuto.every(steps=5)))
    state = {"w": np.zeros(1000)}
    save, keep = tenuto.every(steps=1), tenuto.keep.latest(1)
    with tenuto.Checkpointer(where, state, save=save, keep=keep) as ckpt:
        for _ in ckpt.steps(7):
            ckpt.wait()
    found = look(fast)
    assert [place.url for place in found.places] == [str(fast), str(slow)]
    run = found.runs[0]
    assert [(row.id.step, row.places) for row in run.spread] == [(7, ("whole", "")), (5, ("", "whole"))]
    assert run.behind == (0, 1)
    assert survivors(found) == {"process": 7, "node": 5, "site": None}


def test_packs_of_several_places_make_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With each node's own disk the home has the manifest and the disk the data: this node's loss takes both."""
    home, disk = tmp_path / "home", tmp_path / "disk"
    shared(monkeypatch, home)
    save(tenuto.PerNode(disk, home=home), 1)
    found = look(home)
    assert found.runs[0].spread[0].places == ("", "whole")
    assert survivors(found) == {"process": 1, "node": None, "site": None}
    assert "node" not in found.places[1].survives


def test_another_nodes_disk_survives_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, disk = tmp_path / "home", tmp_path / "disk"
    shared(monkeypatch, home)
    save(tenuto.PerNode(disk, home=home, node="another"), 1)
    assert socket.gethostname() != "another"
    assert survivors(look(home)) == {"process": 1, "node": 1, "site": None}


def test_a_place_that_is_away_is_named(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    save(source, 1)
    tenuto.Repository(source).replicate(copy)
    copy.rename(tmp_path / "away")
    found = look(source)
    assert found.places[1].problem.startswith("no copy there now")
    assert found.runs[0].behind == (0, 1)


def test_a_copy_looked_at_by_itself_says_what_it_is(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    save(source, 1)
    tenuto.Repository(source).replicate(copy)
    assert [place.kind for place in look(copy).places] == ["copy"]


def test_memory_outlives_the_process(tmp_path: Path) -> None:
    state = {"w": np.zeros(1000)}
    with tenuto.Checkpointer(
        tmp_path / "ckpts", state, memory=tenuto.every(steps=1), save=tenuto.every(steps=100)
    ) as ckpt:
        for step in ckpt.steps(7):
            if step == 6:
                found = look(tmp_path / "ckpts")
                process, node, _ = found.runs[0].recovery
                assert process.source == "memory" and process.id is not None
                assert found.runs[0].owner.verdict == "here" and found.runs[0].beat_s is not None
                assert node.id is None
    assert found.runs[0].spread == ()


def test_the_file_system_of_a_path(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/sda / ext4 rw 0 0\nserver:/x /shared nfs4 rw 0 0\nm /shared/a\\040b fuse.sshfs rw 0 0\n")
    kinds = [file_system(path, str(mounts)) for path in ("/data", "/shared/ckpts", "/sharedx", "/shared/a b/c")]
    assert kinds == ["ext4", "nfs4", "ext4", "fuse.sshfs"]
    assert [is_network(kind) for kind in kinds] == [False, True, False, True]
    assert file_system("/x", str(tmp_path / "none")) == ""
