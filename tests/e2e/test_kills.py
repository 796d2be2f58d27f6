"""R2: killed training ends bit for bit as training that is not. A slice of `python -m holdfast.demo.campaign`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def run(*arguments: str, timeout: float) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=timeout)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.campaign
def test_r2_twenty_kills(tmp_path: Path) -> None:
    out = tmp_path / "account.json"
    status, _, said = run(
        "holdfast.demo.campaign", "--kills", "20", "--steps", "120", "--seed", "1", "--json", str(out), timeout=200
    )
    assert out.exists(), said
    account: dict[str, Any] = json.loads(out.read_text())
    assert status == 0, account
    assert account["equal"] is True
    assert account["kills"] >= 20
    assert account["kills_while_saving"] >= 1
    assert account["kills_while_starting"] >= 1
