"""A Ceph cluster of one monitor, one OSD and one RADOS gateway, which speaks S3, on loopback.

The OSD keeps its objects in BlueStore on a sparse file: what it has acknowledged survives `kill -9` of all three.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from campaigns.ports import free_port
from stores.install import run
from stores.s3_server import ACCESS_KEY, SECRET_KEY, S3Server
from stores.server_process import ServerProcess, answers, installed

_CONF = """
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon},v1:127.0.0.1:{mon_v1}]
mon initial members = a
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = {home}/keyring
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon data avail crit = 1
osd crush chooseleaf type = 0
run dir = {home}/run
admin socket = {home}/run/$cluster-$name.asok
log file = {home}/$name.log
pid file = {home}/run/$name.pid
crash dir = {home}/crash
osd class dir = {libraries}/rados-classes
erasure code dir = {libraries}/ceph/erasure-code
plugin dir = {libraries}/ceph
[mon.a]
mon data = {home}/mon
mon cluster log file = {home}/cluster.log
[osd.0]
osd data = {home}/osd
osd objectstore = bluestore
bluestore block create = true
bluestore block size = 21474836480
bluefs buffered io = true
osd memory target = 939524096
[client.rgw]
rgw data = {home}/rgw
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw thread pool size = 64
"""


class CephGateway(S3Server):
    """`home` is a new directory, best in memory: the OSD flushes for every object."""

    name = "ceph"

    def __init__(self, home: Path) -> None:
        root = installed("ceph") / "root"
        libraries = next((root / "usr/lib").glob("*-linux-gnu"))
        self.port = free_port()
        self.home = home
        self._root = root
        for directory in ("mon", "osd", "rgw", "run", "crash"):
            (home / directory).mkdir(parents=True)
        mon = free_port()
        (home / "ceph.conf").write_text(
            _CONF.format(fsid=uuid.uuid4(), home=home, libraries=libraries, mon=mon, mon_v1=free_port(), port=self.port)
        )
        self._environment = {
            "CEPH_CONF": str(home / "ceph.conf"),
            "LD_LIBRARY_PATH": f"{libraries}:{libraries}/ceph:{root}/lib/{libraries.name}",
            "PYTHONPATH": str(root / "usr/lib/python3/dist-packages"),
        }
        self._monitor = self._server("ceph-mon", "-i", "a", ready=answers(mon))
        self._osd = self._server("ceph-osd", "-i", "0", ready=lambda: True)
        self.gateway = self._server("radosgw", "-n", "client.rgw", ready=answers(self.port))

    def start(self) -> None:
        """Creates the cluster and its one user, and starts it."""
        keyring = self.home / "keyring"
        osd = str(uuid.uuid4())
        fsid = self._tool("ceph-conf", "--lookup", "fsid").strip()
        address = self._tool("ceph-conf", "--lookup", "mon host").strip()
        self._tool("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        for who in ("client.admin", "client.rgw", "osd.0"):
            caps = ["--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *"]
            self._tool("ceph-authtool", keyring, "--gen-key", "-n", who, *caps)
        monmap = self.home / "monmap"
        for_all = ["--set-min-mon-release", "pacific", "--enable-all-features", "--clobber"]
        self._tool("monmaptool", "--create", "--addv", "a", address, "--fsid", fsid, *for_all, monmap)
        self._tool("ceph-mon", "--mkfs", "-i", "a", "--keyring", keyring, "--monmap", monmap)
        self._monitor.start()
        self._ceph("osd", "new", osd)
        for who in ("osd.0", "client.rgw"):
            self._ceph("auth", "add", who, "-i", keyring)
        for directory in ("rgw", "osd"):
            (self.home / directory / "keyring").write_bytes(keyring.read_bytes())
        self._tool("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._osd.start()
        self._ceph("osd", "crush", "add", "osd.0", "1.0", "root=default", "host=localhost")
        self.gateway.start(120)
        user = ["--uid=tenuto", "--display-name=tenuto", f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}"]
        self._tool("radosgw-admin", "user", "create", *user)

    def kill(self) -> None:
        """Kills the gateway, the OSD and the monitor at once, as a lost machine would."""
        for server in (self.gateway, self._osd, self._monitor):
            server.kill()

    def restart(self) -> None:
        for server in (self._monitor, self._osd, self.gateway):
            server.start(120)

    def stop(self) -> None:
        for server in (self.gateway, self._osd, self._monitor):
            server.stop()

    def _server(self, program: str, *words: str, ready: object) -> ServerProcess:
        path = self._root / "usr/bin" / program
        return ServerProcess([path, *words, "-f"], self.home / f"{program}.out", ready, self._environment)  # type: ignore[arg-type]

    def _tool(self, program: str, *words: str | Path) -> str:
        return run([self._root / "usr/bin" / program, *words], env=os.environ | self._environment)

    def _ceph(self, *words: str | Path) -> str:
        # Debian's `ceph` is a script for Debian's own Python: its rados module is built for no other.
        script = self._root / "usr/bin/ceph"
        return run(["timeout", "60", "/usr/bin/python3", script, *words], env=os.environ | self._environment)
