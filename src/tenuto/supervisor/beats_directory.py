"""The directory of the heartbeats of one start, in this machine's memory, and those that killed supervisors have left.

Each says whose it is, and has a file that its supervisor keeps locked: trainings wait for that lock, and leave when
they get it. The next supervisor of the same user removes those whose owner is dead, as far as this host can
tell: by boot, namespace, process id and start time.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

from tenuto.concurrency.process import judge, this_process
from tenuto.model.records import Owner
from tenuto.telemetry.heartbeat import ALIVE_FILE

PREFIX: Final = "tenuto-beats-"
OWNER_FILE: Final = "owner"
_LARGEST: Final = 4096


@contextmanager
def beats_directory() -> Iterator[Path]:
    """Makes a directory that is removed at the end, after those that dead supervisors have left."""
    memory = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())
    remove_left(memory)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=memory, ignore_cleanup_errors=True) as name:
        with open(Path(name) / ALIVE_FILE, "w") as alive:
            fcntl.flock(alive, fcntl.LOCK_EX)
            (Path(name) / OWNER_FILE).write_text(json.dumps(asdict(this_process())))
            yield Path(name)


def remove_left(memory: Path) -> None:
    """Removes the directories of this user's dead supervisors. One that says nothing of its owner stays, as it may be
    in the making."""
    for path in memory.glob(f"{PREFIX}*"):
        with suppress(OSError, ValueError, TypeError):
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            with open(path / OWNER_FILE) as file:
                owner = Owner(**json.loads(file.read(_LARGEST)))
            if judge(owner) == "dead":
                shutil.rmtree(path, ignore_errors=True)
