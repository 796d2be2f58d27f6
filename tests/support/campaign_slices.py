"""A few cases of a campaign, run as its command runs them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support import loaded_interpreter


def reported(module: str, cases: Sequence[str], out: Path, timeout: float) -> dict[str, Any]:
    """What the campaign writes of these cases, after it has said by its exit status that all is as it has to be."""
    done = loaded_interpreter.run(["-m", module, "--json", str(out), "--cases", *cases], torch=True, timeout=timeout)
    assert out.exists(), done.stderr[-3000:]
    found: dict[str, Any] = json.loads(out.read_text())
    assert done.returncode == 0, found
    return found


def outcome_of(report: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in report["outcomes"] if one["name"] == name)
    return found
