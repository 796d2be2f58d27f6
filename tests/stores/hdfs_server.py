"""HDFS on loopback: one NameNode and one DataNode, which also speak WebHDFS. What puts files past the store is a client
of WebHDFS."""

from __future__ import annotations

import getpass
import json
import secrets
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, urlencode, urlsplit
from xml.sax.saxutils import escape

from campaigns.ports import free_port
from stores.install import run
from stores.server_process import ServerProcess, installed

_OPTIONS = [
    "-Xmx384m",
    *("--add-opens=java.base/java.lang=ALL-UNNAMED", "--add-opens=java.base/java.nio=ALL-UNNAMED"),
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
]
_SERVER = "org.apache.hadoop.hdfs.server"
USER = "tenuto"


class HdfsServer:
    """`home` has the configuration and all data. Files belong to `USER`; whoever runs the tests is the superuser."""

    name = "hdfs"

    def __init__(self, home: Path) -> None:
        jars = installed("hdfs") / "jars"
        self.home = home
        self.port, self._web, data = free_port(), free_port(), [free_port() for _ in range(3)]
        self.config = home / "conf"
        for page in ("hdfs", "datanode", "static"):  # what both serve to browsers, which the wheel lacks
            (self.config / "webapps" / page / "WEB-INF").mkdir(parents=True)
            (self.config / "webapps" / page / "WEB-INF/web.xml").write_text("<web-app/>")
        self._write("core-site.xml", {"fs.defaultFS": f"hdfs://{self.address}", "hadoop.tmp.dir": home / "data"})
        self._write(
            "hdfs-site.xml",
            {
                "dfs.replication": 1,
                "dfs.namenode.http-address": f"127.0.0.1:{self._web}",
                "dfs.namenode.rpc-bind-host": "127.0.0.1",
                "dfs.namenode.datanode.registration.ip-hostname-check": "false",
                "dfs.namenode.safemode.extension": 0,
                "dfs.datanode.address": f"127.0.0.1:{data[0]}",
                "dfs.datanode.http.address": f"127.0.0.1:{data[1]}",
                "dfs.datanode.ipc.address": f"127.0.0.1:{data[2]}",
                "dfs.datanode.hostname": "127.0.0.1",
                "dfs.datanode.du.reserved": 0,
                "dfs.heartbeat.interval": 1,
                "dfs.namenode.heartbeat.recheck-interval": 1000,
            },
        )
        self._java = ["java", *_OPTIONS, "-cp", f"{self.config}:{jars}/*"]
        self.namenode = self._server("namenode.NameNode", "namenode", self._is_open)
        self.datanode = self._server("datanode.DataNode", "datanode", lambda: True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _write(self, name: str, properties: Mapping[str, object]) -> None:
        listed = "".join(
            f"<property><name>{key}</name><value>{escape(str(value))}</value></property>"
            for key, value in properties.items()
        )
        (self.config / name).write_text(f"<configuration>{listed}</configuration>")

    def _server(self, program: str, name: str, ready: Any) -> ServerProcess:
        # A test that restarts one has the user of its client in its environment: it would become the superuser.
        superuser = {"HADOOP_USER_NAME": getpass.getuser()}
        return ServerProcess([*self._java, f"{_SERVER}.{program}"], self.home / f"{name}.out", ready, superuser)

    def start(self) -> None:
        run([*self._java, f"{_SERVER}.namenode.NameNode", "-format", "-force", "-nonInteractive"])
        self.restart()

    def restart(self) -> None:
        """Starts what was killed. The NameNode leaves its safe mode once the DataNode has said what it has."""
        if not self.namenode.running:
            self.datanode.kill()  # one that ran on finds a new NameNode only after a minute
        for server in (self.namenode, self.datanode):
            if not server.running:
                server.start(120)
        deadline = time.monotonic() + 120
        while not self._takes_data():
            if time.monotonic() > deadline:
                raise RuntimeError(f"HDFS takes no data:\n{self.namenode.log.read_text()[-3000:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        for server in (self.datanode, self.namenode):
            server.stop()

    def _is_open(self) -> bool:
        with suppress(OSError, HTTPError):
            return bool(self.call("GET", "/", "GETFILESTATUS"))
        return False

    def _takes_data(self) -> bool:
        with suppress(OSError, HTTPError):
            self.put(self.new_place(), "ready", b"1")
            return True
        return False

    # -- WebHDFS -----------------------------------------------------------------------------------------------------

    def call(self, method: str, path: str, op: str, user: str | None = None, **options: object) -> Any:
        """Calls the NameNode, as the superuser unless said otherwise."""
        words = {"op": op, "user.name": user or getpass.getuser(), **options}
        address = f"http://127.0.0.1:{self._web}/webhdfs/v1{quote(path)}?{urlencode(words)}"
        with urllib.request.urlopen(urllib.request.Request(address, method=method), timeout=30) as reply:
            return json.loads(reply.read() or b"{}")

    def safe_mode(self, on: bool) -> None:
        """Turns the NameNode read-only, as administrators do, and back."""
        action = "enter" if on else "leave"
        tool = "org.apache.hadoop.hdfs.tools.DFSAdmin"
        run([*self._java, tool, "-fs", f"hdfs://{self.address}", "-safemode", action])

    def set_space_quota(self, url: str, length: int) -> None:
        self.call("PUT", urlsplit(url).path, "SETQUOTA", namespacequota=2**63 - 1, storagespacequota=length)

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        return {"HADOOP_USER_NAME": USER, "HADOOP_CONF_DIR": str(self.config)}

    def new_place(self) -> str:
        path = f"/t-{secrets.token_hex(8)}"
        self.call("PUT", path, "MKDIRS")
        self.call("PUT", path, "SETOWNER", owner=USER)
        return f"hdfs://{self.address}{path}"

    def web_place(self, url: str) -> str:
        """Returns where fsspec's WebHDFS finds the same files."""
        return f"webhdfs://{USER}@127.0.0.1:{self._web}{urlsplit(url).path}"

    def _create(self, path: str, data: bytes) -> None:
        place = self.call("PUT", path, "CREATE", USER, overwrite="true", noredirect="true")
        urllib.request.urlopen(urllib.request.Request(place["Location"], data, method="PUT"), timeout=30).close()

    def put(self, url: str, name: str, data: bytes) -> None:
        self._create(f"{urlsplit(url).path}/{name}", data)

    def get(self, url: str, name: str) -> bytes | None:
        try:
            place = self.call("GET", f"{urlsplit(url).path}/{name}", "OPEN", USER, noredirect="true")
            with urllib.request.urlopen(place["Location"], timeout=30) as reply:
                data: bytes = reply.read()
        except HTTPError as error:
            if error.code != 404:
                raise
            return None
        return data

    def delete(self, url: str, name: str) -> None:
        self.call("DELETE", f"{urlsplit(url).path}/{name}", "DELETE", recursive="true")
