"""A store that is full or slow for a while, as `tenuto chaos` asks the process that it rehearses with."""

from __future__ import annotations

import errno
import os
import time

from tenuto.errors import StoreFull
from tenuto.model.records import Receipt
from tenuto.store.contract import Content
from tenuto.store.wrappers.delegating import DelegatingStore
from tenuto.telemetry.own_faults import SLOW_S, storage


class StruckStore(DelegatingStore):
    """Refuses puts, or delays them, while `telemetry.own_faults.storage` says so."""

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        now_s = time.monotonic()
        if now_s < storage.full_until_s:
            hint = "a rehearsal by `tenuto chaos`: nothing is really full"
            raise StoreFull(f"writing {name}: {os.strerror(errno.ENOSPC)} (rehearsal)", subject=self.url, hint=hint)
        if now_s < storage.slow_until_s:
            time.sleep(SLOW_S)
        return super().put_if_absent(name, content, token=token)
