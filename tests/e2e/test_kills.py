"""R2: killed training ends bit for bit as training that is not. A slice of `python -m campaigns.kills`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support import loaded_interpreter


def run(*arguments: str, timeout: float) -> tuple[int, str, str]:
    done = loaded_interpreter.run(["-m", *arguments], torch=True, timeout=timeout)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.long
@pytest.mark.campaign
def test_r2_five_kills(tmp_path: Path) -> None:
    out = tmp_path / "account.json"
    status, _, said = run(
        "campaigns.kills", "--kills", "5", "--steps", "40", "--seed", "1", "--json", str(out), timeout=200
    )
    assert out.exists(), said
    account: dict[str, Any] = json.loads(out.read_text())
    assert status == 0, account
    assert account["equal"] is True
    assert account["kills"] >= 5
    assert account["kills_while_saving"] >= 1
    assert account["kills_while_starting"] >= 1


@pytest.mark.campaign
def test_r2_kills_of_encoded_trainings(tmp_path: Path) -> None:
    """What a resumed training names and differs from is what the killed one has committed."""
    out = tmp_path / "account.json"
    arguments = ("--kills", "4", "--per-round", "2", "--steps", "24", "--save-every", "4", "--seed", "3")
    encodings = ("--encoding", "small", "dedupe")
    status, _, said = run("campaigns.kills", *arguments, *encodings, "--json", str(out), timeout=300)
    assert out.exists(), said
    account: dict[str, Any] = json.loads(out.read_text())
    assert status == 0, account
    assert account["equal"] is True and account["kills"] >= 4
    assert {"small", "dedupe"} <= {one["encoding"] for one in account["rounds"]}


@pytest.mark.campaign
def test_r2_twelve_kills_with_a_memory_tier(tmp_path: Path) -> None:
    """Every state that a process goes on from is bitwise the one that its step had when nobody killed the training."""
    out = tmp_path / "account.json"
    arguments = ("--memory", "--kills", "12", "--per-round", "4", "--steps", "40", "--seed", "5", "--json", str(out))
    status, _, said = run("campaigns.kills", *arguments, timeout=300)
    assert out.exists(), said
    account: dict[str, Any] = json.loads(out.read_text())
    assert status == 0, account
    assert account["equal"] is True and account["kills"] >= 12
    assert account["restarts_different"] == 0 and account["restarts_from_memory"] >= 5
    assert account["restarts_equal"] == account["restarts_from_memory"] + account["restarts_from_store"]
    assert account["not_from_the_newest_sealed_state"]["otherwise"] == []
    assert account["fenced"]["rounds"] >= 1 and account["not_kept_in_memory"] is None
    assert account["flushes"]["killed"] >= 1 and len(account["kills_by_place"]) >= 4
    assert sum(sum(points.values()) for points in account["kills_at_named_points"].values()) >= 3
    assert account["steps_done_again"] < account["steps_done_again_from_the_store_alone"]


@pytest.mark.campaign
def test_r2_kills_under_the_supervisor_and_of_it(tmp_path: Path) -> None:
    out = tmp_path / "account.json"
    arguments = (
        "--supervised",
        "--kills",
        "5",
        "--per-round",
        "5",
        "--steps",
        "60",
        "--torch-every",
        "0",
        "--seed",
        "4",
    )
    status, _, said = run("campaigns.kills", *arguments, "--json", str(out), timeout=300)
    assert out.exists(), said
    account: dict[str, Any] = json.loads(out.read_text())
    assert status == 0 and account["equal"] is True and account["kills"] >= 5, account
    assert account["kills_of_the_supervisor"] + account["kills_of_both_at_once"] >= 1
    assert account["restarts_by_a_supervisor"] >= 2
