"""A pack goes out as it fills up, and ends with the capture's failure where there is one."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tenuto.engine.staging import pack_content as engine_content
from tenuto.engine.staging.buffer_layout import PackPlan
from tenuto.engine.staging.pack_content import Filling, PackContent
from tenuto.errors import SaveFailed


def test_pieces_follow_the_filling_and_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_content, "FIRST_PIECE_BYTES", 4096)
    monkeypatch.setattr(engine_content, "LAST_PIECE_BYTES", 8192)
    image = np.arange(5 * 4096, dtype=np.uint64).astype(np.uint8)
    plan = PackPlan("p", 4096, 4096, 3 * 4096 + 10)
    filling = Filling()
    told: list[int] = []
    content = PackContent(plan, memoryview(image), filling, told.append)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.extend(bytes(piece) for piece in content.pieces()))
    reader.start()
    for filled in (4096, 8192, 5 * 4096):
        filling.advance(filled)
    reader.join(30)
    assert not reader.is_alive()
    assert b"".join(got) == image[4096 : 4096 + content.length].tobytes()
    assert told == [8192, 16384, 16394]


def test_a_capture_that_breaks_off_reaches_the_writer() -> None:
    filling = Filling()
    content = PackContent(PackPlan("p", 0, 4096, 8192), memoryview(bytes(8192)), filling)
    filling.fail(SaveFailed("the capture broke off"))
    with pytest.raises(SaveFailed, match="broke off"):
        list(content.pieces())
