"""Reading lines of JSON from a file that another process is still writing."""

from __future__ import annotations

import json
import os
from typing import Any


class GrowingLines:
    """The whole lines of a file, in order, as they come. A last line without its end is not one yet: the writer may be
    in the middle of it, or have been killed there."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._read = 0

    def new(self) -> list[dict[str, Any]]:
        """What has come since the last call; nothing while the file is not there."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]
