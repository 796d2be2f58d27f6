"""A private directory in shared memory: the demo's images are removed with it, and displace nobody else's."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from tenuto.engine.staging import slots


@contextmanager
def own_shared_memory() -> Iterator[None]:
    """Puts images into a directory that is removed after the block, if there is shared memory at all."""
    if not os.access(slots.SHARED_MEMORY, os.W_OK):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="tenuto-demo-", dir=slots.SHARED_MEMORY) as root:
        with mock.patch.object(slots, "SHARED_MEMORY", root):
            yield
