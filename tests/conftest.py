"""Options of the whole test run."""

import functools
import gc
import hashlib
import importlib.metadata
import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _pytest.logging
import pytest
from hypothesis import settings

from support import left_images
from support.memory_training import shared_memory
from tenuto.state import frameworks
from tenuto.training import snapshot

# A slow machine fails no example; searches for long are the campaigns'.
settings.register_profile("unhurried", parent=settings.default, deadline=None, max_examples=50)
settings.load_profile("unhurried")


def pytest_configure(config: pytest.Config) -> None:
    """A shell's background job ignores SIGINT, and so would every process that a test starts and interrupts."""
    if _is_worker(config):
        gc.disable()  # until all is loaded: what is loaded stays, and would be looked through again and again
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _OfTheRootLogger(_pytest.logging.catching_logs[Any]):
    """What is logged during a test, for `caplog` and for the report of a failure.

    pytest's own looks through all loggers, six times for each test, for those that pass nothing on to the root: torch
    and others have a thousand, and thirty of these. None of Tenuto's does, so the root's handlers see all that counts.
    """

    __slots__ = ()

    def __enter__(self) -> Any:
        root = logging.getLogger()
        if self.level is not None:
            self.handler.setLevel(self.level)
            self.orig_level = root.level
            root.setLevel(min(self.orig_level, self.level))
        root.addHandler(self.handler)
        self.attached_loggers.append(root)
        return self.handler


_pytest.logging.catching_logs = _OfTheRootLogger  # type: ignore[misc]


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def pytest_sessionstart(session: pytest.Session) -> None:
    if not _is_worker(session.config):
        left_images.remove_below(session.config._tmp_path_factory.getbasetemp())  # type: ignore[attr-defined]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not _is_worker(session.config):
        left_images.remove_below(session.config._tmp_path_factory.getbasetemp())  # type: ignore[attr-defined]


def pytest_collection_finish() -> None:
    """What is loaded by now stays: a process that a test forks would look through it all, and so copy its pages. And
    what each process that trains finds out once, from the installed packages and from git, those that are forked know.
    """
    # Each store of a foreign scheme, and each list of formats, would read those of all installed packages anew.
    importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
    frameworks.declared()
    snapshot.code_identity()
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def state_of_its_own(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What verifications remember of one test is nothing to another, nor to whoever runs the tests."""
    name = hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]
    # A patch of its own: the fixture `monkeypatch` is undone before what a test has asked for earlier.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / "state" / name))
        yield


@pytest.fixture(scope="session", autouse=True)
def caches_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What commands keep for this user between calls: tests neither find it nor leave any."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        yield


@pytest.fixture
def root() -> Iterator[Path]:
    """Shared memory of a test's own, for its images."""
    with shared_memory() as found:
        yield found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-snapshots",
        action="store_true",
        help="Write what the commands print now to tests/snapshots/cli, instead of comparing; look at the difference.",
    )
    parser.addoption("--long", action="store_true", help="Run what takes long, and nothing else.")


LONGEST = [
    "e2e/test_sealed_emergency_places.py",
    "multiprocess/test_gather.py",
    "crash/test_rank_crashes.py",
    "multiprocess/test_ranks.py",
    "unit/encoding/test_repack.py",
    "e2e/test_emergency_places.py",
    "e2e/test_run.py",
    "snapshots/test_cli.py",
    "e2e/test_run_watching.py",
    "multiprocess/test_memory.py",
    "unit/training/test_tiers.py",
    "docs/test_code_blocks.py",
    "unit/maintenance/test_interleavings.py",
    "e2e/test_demo.py",
    "unit/history/test_catalog_cache.py",
    "crash/test_crash_states.py",
    "unit/integrations/torch_state/test_sharded_ranks.py",
    "conformance/test_ranks.py",
    "e2e/test_certify.py",
    "crash/test_corruption.py",
    "e2e/test_memory.py",
    "e2e/test_run_nodes.py",
    "unit/codec/test_codecs.py",
    "unit/encoding/test_encoded_places.py",
    "multiprocess/test_ranks_trouble.py",
    "unit/encoding/test_failing_places.py",
    "multiprocess/test_ranks_lost.py",
    "unit/store/test_objects_failures.py",
    "e2e/test_run_recovery.py",
    "unit/encoding/test_encoded_nodes.py",
    "unit/testing/test_trainer_suite.py",
    "e2e/test_console.py",
    "e2e/test_kills.py",
    "unit/drill/test_drill.py",
    "e2e/test_chaos.py",
    "e2e/test_memory_neighbours.py",
    "conformance/test_stores.py",
    "multiprocess/test_ranks_phases.py",
    "unit/maintenance/test_checkpoint_copy.py",
    "unit/supervisor/risk/test_model.py",
    "multiprocess/test_dcp.py",
    "e2e/test_risk.py",
    "unit/supervisor/risk/test_trust.py",
    "unit/encoding/test_encoded_saves.py",
    "e2e/test_exact_resume.py",
    "unit/training/test_fenced_saves.py",
    "unit/maintenance/test_shared_packs.py",
    "unit/policy/test_prediction.py",
    "pages/test_report_page.py",
    "unit/encoding/test_rounded_copies.py",
    "crash/test_faulty_disk.py",
    "unit/cli/test_probe.py",
    "unit/integrations/torch_data/test_positions.py",
    "unit/training/test_tiers_in_trouble.py",
    "e2e/test_resume_ranks.py",
    "unit/report/test_report.py",
    "unit/encoding/test_any_state.py",
    "e2e/test_emergency.py",
    "unit/encoding/test_sealed_saves.py",
    "unit/repo/test_claim.py",
    "e2e/test_stateful.py",
    "attacks/test_attacks.py",
    "unit/store/test_objects_suite.py",
    "unit/training/test_per_node.py",
    "e2e/test_certify_ranks.py",
    "unit/policy/test_optimum.py",
    "unit/engine/group/test_reading_together.py",
    "multiprocess/test_ranks_store.py",
    # `make test-stores`
    "stores/test_tiers_on_ceph.py",
    "stores/test_ceph.py",
    "stores/test_hdfs.py",
    "stores/test_training_on_s3.py",
    "stores/test_moto.py",
    "stores/test_google.py",
]
"""Files of more than some ten seconds, the longest first. They begin first: a worker that began one of them last would
keep the others waiting."""


def turn(item: pytest.Item) -> int:
    """When its file begins; all others come behind the longest, as they are."""
    path = item.nodeid.partition("::")[0].removeprefix("tests/")
    return LONGEST.index(path) if path in LONGEST else len(LONGEST)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=turn)
    wanted = config.getoption("--long")
    if any("::" in word for word in config.args) and not wanted:
        return  # who names a test wants it, however long it takes
    left_out = [item for item in items if (item.get_closest_marker("long") is not None) != wanted]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if (item.get_closest_marker("long") is not None) == wanted]
