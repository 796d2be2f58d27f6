"""An interrupt at the moment at which a writing thread begins: nobody waits for an image that nobody fills."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

import tenuto
from tenuto.concurrency.worker_threads import BackgroundWork, foreground_threads


def test_a_thread_that_has_begun_does_not_wait_for_a_capture_that_never_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, begun = foreground_threads.run, list[BackgroundWork]()

    def interrupted(given: BackgroundWork) -> None:
        run(given)
        if given.name.startswith("tenuto-save"):
            while not given._claimed.locked():
                time.sleep(0.001)
            begun.append(given)
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(foreground_threads, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tenuto.save({"w": np.ones(3)}, tmp_path)
    begun[0].join(30)
    assert not begun[0].is_alive()
    assert tenuto.save({"w": np.ones(3)}, tmp_path).step >= 0
