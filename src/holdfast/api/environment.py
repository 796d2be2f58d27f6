"""What ran: versions and the machine, for a person who asks later. No names of users, no paths, no environment
variables."""

from __future__ import annotations

import platform
import sys
from typing import Any

import numpy

from holdfast.errors import UnsupportedPlatform
from holdfast.model.checkpoint import Json
from holdfast.version import __version__


def environment() -> dict[str, Json]:
    """Versions of what is loaded already; nothing is imported for it."""
    found: dict[str, Json] = {
        "holdfast": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "numpy": numpy.__version__,
    }
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(torch.__version__)
    return found


def check_platform() -> None:
    """Raises UnsupportedPlatform on Windows, whose files cannot give what the commit needs."""
    if sys.platform == "win32":
        raise UnsupportedPlatform(
            "Holdfast does not run on Windows: its commit needs links and directory flushes that are not there",
            hint="use Linux, or the Windows Subsystem for Linux",
        )
