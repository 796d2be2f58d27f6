"""Options of the whole test run."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-snapshots",
        action="store_true",
        help="Write what the commands print now to tests/snapshots/cli, instead of comparing; look at the difference.",
    )
