"""Bugs in the handling of faults, put in one at a time: each has to be seen, or the campaign sees nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from campaigns import broken_layers as layers
from campaigns.scenarios import Seeded
from tenuto.engine.save import saver as engine_save
from tenuto.engine.save.save_writer import SaveWriter
from tenuto.errors import TenutoError
from tenuto.policy.keep import KeepPolicy, KeepVerdict
from tenuto.repo.ownership import lease
from tenuto.store.local import os_errors
from tenuto.testing.layers import Layer
from tenuto.training.exit_status import ExitStatus
from tenuto.training.saves import RunSaver


@dataclass(frozen=True)
class Bug:
    """`ways`: how it is looked for; `calls`: at which calls; `phases`: while what is under way (all, if empty)."""

    name: str
    breaks: str
    ways: tuple[str, ...]
    calls: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    seeded: Seeded = field(default_factory=Seeded)
    patch: Callable[[], AbstractContextManager[Any]] = nullcontext


SAVING = ("save", "save and wait", "drain")


class SwallowWriteErrors(Layer):
    """What could not be written counts as written."""

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        try:
            return super().pwrite(descriptor, buffers, offset)
        except OSError:
            return sum(buffer.nbytes for buffer in buffers)


class SwallowDirectoryFlushErrors(Layer):
    """A directory that could not be flushed counts as flushed."""

    def fsync_directory(self, path: str) -> None:
        try:
            super().fsync_directory(path)
        except OSError:
            return


class SwallowNaming(Layer):
    """A name that could not be given counts as given."""

    def link(self, source: str, target: str) -> None:
        try:
            super().link(source, target)
        except FileExistsError:
            raise
        except OSError:
            return


def _replace(owner: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(owner, name, value)


def _wait_for_ever(self: RunSaver, timeout: float | None) -> None:
    self.saver.join(None)


def _reported_at_once(self: RunSaver, error: TenutoError) -> None:
    """As if `on_error` were always "raise"."""
    self.exit_status.fail(error.message)
    with self.lock:
        self._failure = error


def _reported_all_the_same(self: SaveWriter, job: Any, attempt: Any, error: BaseException) -> None:
    """A save that broke off counts as committed."""


def _in_doubt_is_done(self: SaveWriter, job: Any, attempt: Any, error: BaseException) -> bool:
    return str(job.save.phase) != "committing"


@contextmanager
def _raw_errors() -> Iterator[None]:
    """What the operating system says comes out as it is."""
    with mock.patch.object(os_errors, "meaning", lambda error, *_: error):
        yield


@contextmanager
def _drop_the_newest() -> Iterator[None]:
    """Retention lets go of the newest checkpoint."""

    def decide(self: KeepPolicy, facts: Any) -> list[KeepVerdict]:
        newest = max((found.id for found in facts), default=None)
        return [KeepVerdict(found.id, found.id != newest, "newest") for found in facts]

    with mock.patch("tenuto.policy.keep.Latest.decide", decide):
        yield


def _layer(name: str, breaks: str, layer: Callable[..., Any], ways: tuple[str, ...], *calls: str) -> Bug:
    return Bug(name, breaks, ways, calls, SAVING, Seeded(above=layer))


BUGS: tuple[Bug, ...] = (
    _layer("write error swallowed", "a pack has a hole", SwallowWriteErrors, ("EIO", "ENOSPC"), "pwrite"),
    _layer("flush error ignored", "lost pages count as saved", layers.IgnoreFlushError, ("EIO",), "fsync"),
    _layer("flush tried again", "the second flush of lost pages succeeds", layers.RetryFlush, ("EIO",), "fsync"),
    _layer(
        "directory's flush error ignored",
        "a reported checkpoint loses its name",
        SwallowDirectoryFlushErrors,
        ("EIO",),
        "fsync_directory",
    ),
    _layer("short write taken for whole", "the end is missing", layers.TakeShortWritesForWhole, ("short",), "pwrite"),
    _layer("naming error swallowed", "an object is not there", SwallowNaming, ("EIO", "ENOSPC"), "link"),
    Bug(
        "close waits without a deadline",
        "a hung store holds the process for ever",
        ("hung", "dead"),
        (),
        ("drain",),
        patch=_replace(RunSaver, "wait", _wait_for_ever),
    ),
    Bug(
        "last beat without a deadline",
        "a hung store holds the process for ever",
        ("hung", "dead"),
        (),
        ("close",),
        patch=_replace(lease, "within", lambda seconds, what, work, *, subject: work()),
    ),
    Bug(
        "ownership is checked without a deadline",
        "a hung store holds the training for ever",
        ("hung",),
        ("listdir",),
        ("save", "save and wait"),
        patch=_replace(
            engine_save,
            "begun_within",
            lambda seconds, what, work, *, subject: work,
        ),
    ),
    Bug(
        "a failed save is reported as committed",
        "a checkpoint that is not there",
        ("EIO",),
        ("pwrite", "fsync", "link"),
        SAVING,
        patch=_replace(SaveWriter, "_failed", _reported_all_the_same),
    ),
    Bug(
        "a commit in doubt is reported as done",
        "a manifest that may be lost counts",
        ("EIO",),
        ("fsync", "fsync_directory", "link"),
        SAVING,
        patch=_replace(SaveWriter, "_closed", _in_doubt_is_done),
    ),
    Bug(
        "failures are not told by the exit status",
        "a job scheduler takes a training without checkpoints for a good one",
        ("EIO", "ENOSPC"),
        ("create", "pwrite"),
        SAVING,
        patch=_replace(ExitStatus, "fail", lambda self, reason: None),
    ),
    Bug(
        "the exit status never forgets",
        "a training that made good is reported as failed",
        ("EIO",),
        ("create", "pwrite"),
        ("save", "drain"),
        patch=_replace(ExitStatus, "clear", lambda self: None),
    ),
    Bug(
        "every failure is raised",
        'training ends although on_error is "warn"',
        ("EIO",),
        ("create", "pwrite"),
        SAVING,
        patch=_replace(RunSaver, "_fail", _reported_at_once),
    ),
    Bug(
        "errors of the operating system pass as they are",
        "nothing names the object or what to do",
        ("EIO", "EINTR"),
        ("open", "listdir"),
        ("construct", "restore", "claim"),
        patch=_raw_errors,
    ),
    Bug(
        "retention drops the newest",
        "the last good checkpoint is gone",
        ("slow",),
        ("create",),
        SAVING,
        patch=_drop_the_newest,
    ),
    Bug(
        "passing faults are not tried again",
        "an interrupted call costs a save",
        ("EINTR", "lost reply"),
        (),
        SAVING,
        patch=lambda: mock.patch("tenuto.store.wrappers.retry.Patience.__call__", lambda self, work: work()),
    ),
)
