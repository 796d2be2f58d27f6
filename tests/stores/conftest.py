"""Real servers on loopback, each started by the first test that needs it. `make test-stores` installs them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import psutil
import pytest

from stores.ceph_gateway import CephGateway
from stores.hdfs_server import HdfsServer
from stores.server_process import ServerProcess
from stores.small_servers import AzuriteServer, GoogleMotoServer, MotoServer, RcloneServer

_HOMES = "tenuto-servers-"


@pytest.fixture(scope="session")
def servers_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory for what servers keep: in memory, where files there can be written past the page cache as Ceph does.
    It carries the run's process, so that the next run removes what a killed one has left."""
    memory = Path("/dev/shm")
    for left in memory.glob(f"{_HOMES}*"):
        if not psutil.pid_exists(int(left.name.removeprefix(_HOMES))):
            shutil.rmtree(left, ignore_errors=True)
    home = memory / f"{_HOMES}{os.getpid()}" if _takes_direct_writes(memory) else tmp_path_factory.mktemp("servers")
    home.mkdir(exist_ok=True)
    yield home
    shutil.rmtree(home)


def _takes_direct_writes(directory: Path) -> bool:
    try:
        with tempfile.NamedTemporaryFile(dir=directory) as file:
            os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True


def _home(servers_home: Path, name: str) -> Path:
    (servers_home / name).mkdir()
    return servers_home / name


@pytest.fixture(scope="session")
def ceph(servers_home: Path) -> Iterator[CephGateway]:
    server = CephGateway(_home(servers_home, "ceph"))
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def hdfs(servers_home: Path) -> Iterator[HdfsServer]:
    server = HdfsServer(_home(servers_home, "hdfs"))
    try:
        server.start()
        yield server
    finally:
        server.stop()


class _OneProcess(Protocol):
    process: ServerProcess


def _running(server: _OneProcess) -> Iterator[_OneProcess]:
    try:
        server.process.start()
        yield server
    finally:
        server.process.stop()


@pytest.fixture(scope="session")
def moto(servers_home: Path) -> Iterator[_OneProcess]:
    yield from _running(MotoServer(_home(servers_home, "moto")))


@pytest.fixture(scope="session")
def google(servers_home: Path) -> Iterator[_OneProcess]:
    yield from _running(GoogleMotoServer(_home(servers_home, "google")))


@pytest.fixture(scope="session")
def rclone(servers_home: Path) -> Iterator[_OneProcess]:
    yield from _running(RcloneServer(_home(servers_home, "rclone")))


@pytest.fixture(scope="session")
def azurite(servers_home: Path) -> Iterator[_OneProcess]:
    yield from _running(AzuriteServer(_home(servers_home, "azurite")))
