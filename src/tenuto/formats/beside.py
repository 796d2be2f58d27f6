"""Files and directories that appear whole: written beside their final path, flushed, then given their name."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import TracebackType

from tenuto.errors import StoreError, StoreFull, UsageError, typed
from tenuto.formats.registry import detect, head
from tenuto.regular_files import strange
from tenuto.repo.format.object_names import REPOSITORY


class Beside:
    """A path `part` next to `out`, for whoever writes it, until `publish`. What was not published is removed at the end
    of the `with` block; an OSError in it becomes a StoreError that names `out`."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.part = out.with_name(f".{out.name}.{os.getpid()}.part")

    def check(self, *, force: bool) -> None:
        """Raises UsageError if something is at `out` that is not to be replaced. A directory is replaced only where it
        holds nothing but a checkpoint as its format writes one: nothing else is ever removed by --force."""
        if not os.path.lexists(self.out):
            return
        if not force:
            raise UsageError(f"{self.out} is there already", subject=str(self.out), hint="--force replaces it")
        if self.out.exists() and (kind := strange(self.out.stat().st_mode)) is not None:
            raise UsageError(
                f"{self.out} is {kind}, which is not replaced",
                subject=str(self.out),
                hint="name a file that is not there",
            )
        other = _other(self.out) if self.out.is_dir() else None
        if other is not None:
            raise UsageError(
                f"{self.out} is a directory with other things in it, which are not replaced: {other}",
                subject=str(self.out),
                hint="name a directory that is not there",
            )

    def clear(self) -> None:
        """Removes what was written so far, to begin again."""
        if self.part.is_dir() and not self.part.is_symlink():
            shutil.rmtree(self.part)
        else:
            self.part.unlink(missing_ok=True)

    def publish(self, *, force: bool) -> None:
        """Makes what was written durable and gives it its name. Raises UsageError if that was taken meanwhile."""
        directory = self.part.is_dir()
        for path in [*self.part.rglob("*"), self.part] if directory else [self.part]:
            _flush(path)
        if force and directory and self.out.is_dir():
            old = self.part.with_suffix(".old")
            os.rename(self.out, old)
            os.rename(self.part, self.out)
            shutil.rmtree(old)
        elif force:
            os.replace(self.part, self.out)
        else:
            self._give_name(directory)

    def _give_name(self, directory: bool) -> None:
        taken = UsageError(f"{self.out} is there already", subject=str(self.out), hint="--force replaces it")
        if directory:
            if os.path.lexists(self.out):  # a rename would replace an empty directory
                raise taken
            os.rename(self.part, self.out)
            return
        try:
            os.link(self.part, self.out)
        except FileExistsError:
            raise taken from None
        except OSError:  # no hard links here: then only the earlier check keeps it from replacing a file
            os.replace(self.part, self.out)

    def __enter__(self) -> Beside:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()
        if isinstance(error, OSError) and not isinstance(error, StoreError):
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            look = f"{typed('ls', '-ld', self.out.parent)}  # is it there, who may write to it, and is it mounted so"
            raise (StoreFull if full else StoreError)(
                f"{self.out} cannot be written: {error.strerror or error}",
                subject=str(self.out),
                hint="make room there, or write elsewhere" if full else look,
            ) from error


def refuse_other(path: Path, marker: str, what: str, option: str) -> None:
    """Raises UsageError if something is at `path` that has not `marker` in its first 4 KiB, and so is not `what` Tenuto
    writes there: only that is replaced. option: what names another file."""
    if not os.path.lexists(path) or (path.is_file() and marker.encode() in head(path, 4096)):
        return
    raise UsageError(
        f"{path} is there and is not {what}: it is not replaced",
        subject=str(path),
        hint=f"give another name with {option}, or remove it",
    )


def _other(directory: Path) -> str | None:
    """Returns the name of something in a directory that no export has written there: other files of the user's, a
    trainer's own checkpoints, a repository. None where there is nothing of the kind."""
    found = detect(directory)
    for path in sorted(directory.iterdir()):
        own = found is not None and any(path.match(pattern) for pattern in found.names)
        below = path.is_dir() and (path.is_symlink() or found is None or not found.nested)
        if not own or below or path.name == REPOSITORY:
            return path.name
    return None


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
