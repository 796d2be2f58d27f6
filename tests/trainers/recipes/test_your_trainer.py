"""The tabs of the guide that this environment runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import tabs


@pytest.mark.parametrize("name", tabs.of("recipes"))
def test_the_blocks_of_a_tab_run_and_resume(name: str, tmp_path: Path) -> None:
    tabs.run(name, tmp_path)
