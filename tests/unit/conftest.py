"""What tests of several rooms ask for."""

from __future__ import annotations

import pytest

from support.carrier import Carrier


@pytest.fixture
def carrier() -> Carrier:
    return Carrier()
