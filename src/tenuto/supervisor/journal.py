"""What happened to a supervised training, a JSON object a line: for whoever asks in the morning, and for programs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


class Journal:
    """Appends to a file, if there is one: for this user alone, as it holds the command line. A file that cannot be
    written stops nothing: it is said once."""

    def __init__(self, path: Path | None, report: Callable[[str], None]) -> None:
        self.path = path
        self.listen: Callable[[str, Mapping[str, Any]], None] = lambda event, facts: None
        """Called with each event."""
        self._report = report
        self._broken = False

    def write(self, event: str, **facts: Any) -> None:
        self.listen(event, facts)
        if self.path is None:
            return
        line = json.dumps({"time": _now(), "monotonic_s": round(time.monotonic(), 3), "event": event, **facts})
        try:
            self.path.parent.mkdir(0o700, parents=True, exist_ok=True)
            if self.path.parent == default_directory():
                self.path.parent.chmod(0o700)  # an earlier version may have made it
            with open(self.path, "a", opener=_for_this_user) as file:
                file.write(f"{line}\n")
        except OSError as error:
            if not self._broken:
                self._report(f"the journal cannot be written, and nothing is noted there: {error}")
            self._broken = True


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def default_directory() -> Path:
    """Returns where the journals of this user lie where nobody says another place."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "tenuto" / "journals"


def default_path(pid: int) -> Path:
    return default_directory() / f"{_now()[:19].replace(':', '')}-{pid}.jsonl"


def _now() -> str:
    """Returns the wall clock: hung and killed within a second are to be told apart."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
