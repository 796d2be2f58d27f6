"""What every part of the suite is given: the boards of two ranks."""

from __future__ import annotations

from typing import Final

import pytest

from holdfast.ranks.contract import Board

ANSWER_S: Final = 20.0

Boards = tuple[Board, Board]


class Base:
    @pytest.fixture
    def boards(self) -> Boards:
        raise NotImplementedError("give the boards of two ranks, which reach the same empty place")
