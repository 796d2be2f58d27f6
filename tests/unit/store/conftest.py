from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tenuto.store.local.syscalls import OperatingSystem


class Faulty(OperatingSystem):
    """The real file system, with every call listed and chosen ones failing."""

    def __init__(self):
        self.calls = []
        self.faults = {}
        self.before = {}

    def fail(self, method, number, *, at=1, of=None):
        """The `at`th call of `method` (of those whose path ends with `of`) from now on fails with errno `number`."""
        self.faults[method] = [number, at, of]

    def __getattribute__(self, name):
        attribute = object.__getattribute__(self, name)
        if name.startswith("_") or name not in METHODS:
            return attribute

        def call(*arguments, **options):
            subject = arguments[0] if arguments else None
            self.calls.append((name, subject))
            hook = self.before.pop(name, None)
            if hook is not None:
                hook()
            fault = self.faults.get(name)
            if fault is not None and (fault[2] is None or str(subject).endswith(fault[2])):
                fault[1] -= 1
                if fault[1] == 0:
                    del self.faults[name]
                    raise OSError(fault[0], os.strerror(fault[0]), str(subject))
            return attribute(*arguments, **options)

        return call

    def fsync_directory(self, path):
        OperatingSystem().fsync_directory(path)  # as one call: what it does inside is none of the seam's

    def named(self, *methods):
        return [call for call in self.calls if call[0] in methods]


METHODS = {name for name in vars(OperatingSystem) if not name.startswith("_")}


@pytest.fixture
def tmp_path(tmp_path_factory):
    """In memory where there is such a place: these tests flush a lot, and ask nothing of a real disk."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path_factory.mktemp("store")
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tenuto-test-") as place:
        yield Path(place)


@pytest.fixture
def faulty():
    return Faulty()
