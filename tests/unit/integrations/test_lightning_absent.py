"""tenuto.lightning without Lightning."""

from __future__ import annotations

import importlib.util

import pytest

import tenuto.lightning
from tenuto.errors import MissingExtra

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is not None, reason="Lightning is installed here")


@pytest.mark.parametrize("name", tenuto.lightning.__all__)
def test_an_absent_lightning_is_one_error_that_names_the_extra(name: str) -> None:
    with pytest.raises(MissingExtra) as told:
        getattr(tenuto.lightning, name)
    assert ".[lightning]" in str(told.value.hint)
