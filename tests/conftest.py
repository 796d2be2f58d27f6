"""Options of the whole test run."""

import gc
import signal

import pytest
from hypothesis import settings

# A slow machine fails no example; searches for long are the campaigns'.
settings.register_profile("unhurried", parent=settings.default, deadline=None, max_examples=50)
settings.load_profile("unhurried")


def pytest_configure(config: pytest.Config) -> None:
    """A shell's background job ignores SIGINT, and so would every process that a test starts and interrupts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What is loaded by now stays. A process that a test forks would look through it all, and so copy its pages."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-snapshots",
        action="store_true",
        help="Write what the commands print now to tests/snapshots/cli, instead of comparing; look at the difference.",
    )
    parser.addoption("--long", action="store_true", help="Run what takes long, and nothing else.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("--long")
    if any("::" in word for word in config.args) and not wanted:
        return  # who names a test wants it, however long it takes
    left_out = [item for item in items if (item.get_closest_marker("long") is not None) != wanted]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if (item.get_closest_marker("long") is not None) == wanted]
