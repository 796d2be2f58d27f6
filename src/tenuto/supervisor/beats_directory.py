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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

from tenuto.concurrency.process import judge, this_process
from tenuto.model.records import Owner
from tenuto.telemetry.heartbeat import ALIVE_FILE

PREFIX: Final = "tenuto-beats-"
OWNER_FILE: Final = "owner"
_LARGEST: Final = 4096


SHARED_MEMORY: Final = Path("/dev/shm")
_ROOM: Final = 1 << 16
"""Bytes that the beats of hundreds of ranks and their last words take."""


@contextmanager
def beats_directory(report: Callable[[str], None]) -> Iterator[Path]:
    """Makes a directory that is removed at the end, after those that dead supervisors have left; where shared memory is
    full, among the temporary files. `report` is told so."""
    with ExitStack() as undo:
        try:
            found = _made(SHARED_MEMORY, undo)
        except OSError as error:
            report(f"{SHARED_MEMORY} has no room for heartbeats ({error.strerror}): they go to {tempfile.gettempdir()}")
            found = _made(Path(tempfile.gettempdir()), undo)
        yield found


def _made(parent: Path, undo: ExitStack) -> Path:
    """Makes the directory below `parent`, with room in it. Raises OSError, with nothing left there."""
    remove_left(parent)
    with ExitStack() as own:
        made = tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True)
        path = Path(own.enter_context(made))
        alive = own.enter_context(open(path / ALIVE_FILE, "wb"))
        os.posix_fallocate(alive.fileno(), 0, _ROOM)
        os.truncate(alive.fileno(), 0)
        fcntl.flock(alive, fcntl.LOCK_EX)
        (path / OWNER_FILE).write_text(json.dumps(asdict(this_process())))
        undo.push(own.pop_all())
    return path


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
