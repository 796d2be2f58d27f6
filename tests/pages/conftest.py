"""The browser in which pages are looked at. `make test-pages` installs one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pages.install import BROWSERS, browser, environment


def _skip(reason: str) -> None:
    """Skips the tests that need a browser; where it is required, fails them."""
    if os.environ.get("TENUTO_PAGES_REQUIRED"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api") if not os.environ.get("TENUTO_PAGES_REQUIRED") else None
    if playwright is None:
        from playwright import sync_api as playwright
    found = browser()
    if found is None:
        missing = BROWSERS / "missing"
        _skip(f"no browser: {missing.read_text() if missing.exists() else 'run `make test-pages`, which installs one'}")
    with playwright.sync_playwright() as started:
        # The sandbox of a browser needs rights that a container may not have; pages here are our own.
        launched = started.chromium.launch(executable_path=str(found), args=["--no-sandbox"], env=environment())
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.reported import eventful

    place = tmp_path_factory.mktemp("pages")
    eventful(place / "checkpoints", "<b>loss</b>").report().write(place / "report.html")
    return place / "report.html"
