"""The fixture of the suite: the key-value stores of two ranks."""

from __future__ import annotations

from typing import Final

import pytest

from tenuto.ranks.contract import KVStore

ANSWER_S: Final = 20.0

Boards = tuple[KVStore, KVStore]


class Base:
    @pytest.fixture
    def boards(self) -> Boards:
        raise NotImplementedError("give the boards of two ranks, which reach the same empty place")
