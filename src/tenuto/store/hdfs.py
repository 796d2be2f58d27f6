"""Files of a Hadoop file system below a directory, through hdfs-native.

An object is written under a temporary name, flushed to the disks of its DataNodes, and renamed without overwriting: the
NameNode decides who gets a name. Each file up to 1 GiB is one block, because a flush reaches no block but the last.

Nothing here retries. Of the client's own attempts only those remain that find the active one of several NameNodes.

The client waits without limit for a NameNode that accepts connections and never answers. So each of its calls has a
deadline, after which its thread stays behind and the next call gets a new connection.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

import numpy as np
from hdfs_native import Client, FileReader, WriteOptions

from tenuto.concurrency.deadlines import within
from tenuto.errors import (
    AlreadyExists,
    DeadlineExceeded,
    ForkedProcess,
    ObjectNotFound,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    TenutoError,
    UsageError,
)
from tenuto.model.records import Receipt
from tenuto.store.base import BaseReader
from tenuto.store.contract import (
    TEMPORARY,
    Capabilities,
    Content,
    Stat,
    check_name,
    check_new_name,
    check_prefix,
    check_token,
)
from tenuto.store.trees import Node, TreeStore, strides

_READ: Final = 8 << 20
_MIB: Final = 1 << 20
_BLOCK: Final = 128 << 20
_LONGEST_BLOCK: Final = 1 << 30
_ANY_LENGTH: Final = 1 << 20
"""Below so many bytes a put does not first ask whether the name is taken."""
ANSWER_S: Final = 15.0
"""The longest that a NameNode may take for an answer: half of what the wrapper takes for its retries, so that there is
a second try."""
_FAILOVER_S: Final = 45.0
"""The same where the active one of several has to be found: a lost machine takes the client 15 s."""
_DATA_S: Final = 120.0
"""The longest for what waits for the disks of DataNodes too."""
_NODES: Final = re.compile(r"([\w.-]+(:\d{1,5})?)?", re.ASCII)

P = ParamSpec("P")
R = TypeVar("R")

_used_by: int | None = None
"""The process in which the client's threads run, once there are any: a forked child has none, and would wait for
ever."""


def open_url(url: str) -> HdfsStore:
    """Opens the store of a URL, without touching it. Raises UsageError for one that names none."""
    rest = url.partition("://")[2]
    nodes, _, path = rest.partition("/")
    if "?" in rest or "#" in rest or "@" in nodes:
        raise UsageError(
            "an hdfs:// URL names a NameNode and a directory and nothing else: this one has a query, a fragment or a "
            "user name",
            subject="hdfs://",
            hint="HADOOP_USER_NAME, or `kinit` for Kerberos, says who you are",
        )
    try:
        check_prefix(path := path.strip("/"))
    except StoreError:
        path = ""
    if _NODES.fullmatch(nodes) is None or not path or not path.isprintable():
        raise UsageError(
            f"{url!r} names no directory of a Hadoop file system",
            subject=url,
            hint="write hdfs://NAMENODE:8020/the/directory, or hdfs:///the/directory for the file system of "
            "HADOOP_CONF_DIR",
        )
    return HdfsStore(nodes, path)


class HdfsStore(TreeStore):
    """The store of hdfs://`nodes`/`path`. nodes: a NameNode with its port, a name of the configuration for several, or
    nothing for the configuration's own file system."""

    def __init__(self, nodes: str, path: str) -> None:
        self._url: Final = f"hdfs://{nodes}/{path}"
        self._nodes_url: Final = f"hdfs://{nodes}" if nodes else None
        self._root: Final = f"/{path}"
        self._commits = True
        self._found: Client | None = None
        self._answer_s: Final = ANSWER_S if ":" in nodes else _FAILOVER_S
        self._lock: Final = threading.Lock()
        # A NameNode of its own address is tried once; of several the active one has to be found.
        self._config: Final = {
            "dfs.client.failover.max.attempts": "0" if ":" in nodes else "4",
            "dfs.client.failover.sleep.base.millis": "100",
            "dfs.client.failover.sleep.max.millis": "1000",
            "dfs.client.socket-timeout": "15000",
        }

    def __repr__(self) -> str:
        return f"HdfsStore({self.url!r})"

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(commits=self._commits, persistent=True, lists_times=True, part_bytes=_READ)

    def probe(self) -> Capabilities:
        found = super().probe()
        self._commits = found.commits
        return found

    def _client(self) -> Client:
        global _used_by  # noqa: PLW0603 - the client's threads belong to the process, not to a store
        with self._lock:
            if _used_by is None:
                _used_by = os.getpid()
            elif _used_by != os.getpid():
                raise ForkedProcess(
                    f"{self.url} was in use when this process was forked, and cannot be used in the child",
                    subject=self.url,
                    hint="start workers with multiprocessing's 'spawn' or 'forkserver' (DataLoader: "
                    "multiprocessing_context=), or read in the parent",
                )
            if self._found is None:
                with self._translated("opening", ""):
                    self._found = Client(self._nodes_url, self._config)
            return self._found

    def _ask(
        self, doing: str, name: str, seconds: float, call: Callable[P, R], *args: P.args, **options: P.kwargs
    ) -> R:
        """Returns what a call of the client does. Raises what its error means; _NoAnswer after `seconds`."""
        try:
            with self._translated(doing, name):
                return within(seconds, f"{doing} {name}", partial(call, *args, **options), subject=self.url)
        except DeadlineExceeded:
            with self._lock:
                self._found = None  # its connection may be one to a machine that is gone
            raise _NoAnswer(
                f"{doing} {name} at {self.url}: the NameNode or a DataNode has not answered for {seconds:g} s",
                subject=name or self.url,
                hint="`hdfs dfsadmin -report` shows whether the NameNode answers, and which DataNodes are alive",
            ) from None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    # -- putting -----------------------------------------------------------------------------------------------------

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        check_new_name(name)
        check_token(token)
        if content.length > _ANY_LENGTH and self._is_taken(name):
            raise self._exists(name)
        # Random too: a second try may begin while the first still has the file open for writing.
        temporary = f"{name}{TEMPORARY}{token}-{secrets.token_hex(4)}"
        try:
            self._write(temporary, name, content)
            self._ask("putting", name, self._answer_s, self._client().rename, self._path(temporary), self._path(name))
        except _NoAnswer:
            raise  # to remove the temporary would wait as long again: gc does
        except BaseException:
            with suppress(StoreError):  # the put's own error counts; what stays behind is a leftover, for gc
                self.delete([temporary])
            raise
        return Receipt(name, content.length, self.url)

    def _write(self, temporary: str, name: str, content: Content) -> None:
        block = max(_BLOCK, min(-(-content.length // _MIB) * _MIB, _LONGEST_BLOCK))
        options = WriteOptions(block_size=block, create_parent=True)
        # Not the client's file object, which calls `close` wherever it is let go: that is a call without a deadline.
        create = self._client().inner.create
        writer = self._ask("putting", name, self._answer_s, create, self._path(temporary), options)
        for piece in strides(name, content):
            # A copy: a write that nobody waits for any more would read memory that has been given back.
            self._ask("putting", name, _DATA_S, writer.write, bytes(piece))
        self._ask("putting", name, _DATA_S, writer.hsync)
        self._ask("putting", name, _DATA_S, writer.close)

    def _is_taken(self, name: str) -> bool:
        try:
            self.stat(name)
        except ObjectNotFound:
            return False
        return True

    def _exists(self, name: str) -> AlreadyExists:
        return AlreadyExists(f"{name} exists already ({self.url})", subject=name)

    # -- reading and listing -----------------------------------------------------------------------------------------

    def open(self, name: str) -> HdfsReader:
        path = self._path(check_name(name))
        return HdfsReader(self, name, self._ask("reading", name, self._answer_s, self._client().read, path))

    def stat(self, name: str) -> Stat:
        path = self._path(check_name(name))
        found = self._ask("looking at", name, self._answer_s, self._client().get_file_info, path)
        if found.isdir:
            raise self._absent(name)
        return Stat(found.length, found.modification_time * 1_000_000)

    def fetch(self, name: str, reader: FileReader, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from an open file."""
        try:
            data = self._ask("reading", name, _DATA_S, reader.read_range, offset, len(buffer))
        except _NoAnswer:
            raise
        except StoreUnavailable:
            self.stat(name)  # raises ObjectNotFound: the blocks of a file that was removed go soon after it
            raise
        # A ufunc copies without the interpreter's lock: other threads read meanwhile.
        np.positive(np.frombuffer(data, np.uint8), out=np.frombuffer(buffer, np.uint8))

    def list_directory(self, directory: str) -> Iterable[Node]:
        path = self._path(directory)
        listed = iter(self._ask("listing", directory, self._answer_s, self._client().list_status, path))
        # The client asks for the next thousand where those before are used up.
        while (found := self._ask("listing", directory, self._answer_s, next, listed, None)) is not None:
            if found.path == path:  # a file: it lists itself
                return
            yield Node(found.path.rpartition("/")[2], found.isdir, found.length, found.modification_time * 1_000_000)

    # -- removing ----------------------------------------------------------------------------------------------------

    def delete(self, names: Sequence[str] | Iterable[str]) -> None:
        """Removes objects, and the directories that are empty then, but never the root's own."""
        emptied: dict[str, None] = {}
        for name in [check_name(name) for name in names]:
            if self._remove(name):
                emptied[name.rpartition("/")[0]] = None
        for directory in sorted(emptied, key=len, reverse=True):
            while "/" in directory and self._remove(directory):
                directory = directory.rpartition("/")[0]  # noqa: PLW2901 - upwards, while they are empty

    def _remove(self, name: str) -> bool:
        """Removes a file or an empty directory. Returns whether it was there."""
        try:
            return self._ask("removing", name, self._answer_s, self._client().delete, self._path(name), False)
        except (_NotEmpty, ObjectNotFound):
            return False

    # -- errors ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _translated(self, doing: str, name: str) -> Iterator[None]:
        try:
            yield
        except TenutoError:
            raise
        except (OSError, RuntimeError, ValueError) as error:
            raise self._meaning(error, doing, name) from None

    def _absent(self, name: str) -> ObjectNotFound:
        return ObjectNotFound(f"there is no object {name} ({self.url})", subject=name)

    def _meaning(self, error: Exception, doing: str, name: str) -> StoreError:
        """What a failed call of the client means. The NameNode says it with the class of a Java exception."""
        text = str(error)
        found = _JAVA.match(text)
        kind, says = (found[1], found[2]) if found else ("", text)
        says = says.partition("\n")[0].partition("\\n")[0][:300]
        what = f"{doing} {name}" if name else doing

        def one(make: type[StoreError], reason: str, hint: str | None = None) -> StoreError:
            return make(f"{what} at {self.url}: {reason}", subject=name or self.url, hint=hint)

        if isinstance(error, FileExistsError):
            return self._exists(name)
        if isinstance(error, FileNotFoundError):
            if doing == "putting":  # the temporary, removed by somebody or moved by a try whose reply was lost
                return one(StoreUnavailable, "its temporary file is not there any more")
            return self._absent(name)
        if kind == "PathIsNotEmptyDirectoryException":
            return one(_NotEmpty, "the directory is not empty")
        if kind == "ParentNotDirectoryException" or says.endswith("(is not a directory)"):
            if doing != "putting":
                return self._absent(name)
            return one(StoreError, "a file stands where a directory of its name would be")
        if kind == "InvalidPathException":
            return one(StoreError, "a Hadoop file system can have no such name: no part may hold a colon")
        if kind in _DENIED or _KERBEROS.search(text) is not None:
            return one(
                StoreDenied,
                f"permission denied: {says}",
                f"`hdfs dfs -ls -d {self._root}` shows whose it is; HADOOP_USER_NAME, or `kinit`, says who you are",
            )
        if kind in _FULL:
            return one(StoreFull, f"the quota is reached: {says}", f"`hdfs dfs -count -q -h {self._root}` shows it")
        if kind == "SafeModeException":
            return one(
                StoreUnavailable,
                "the NameNode is in safe mode, and takes no changes",
                "`hdfs dfsadmin -safemode get` shows it; after a start it ends by itself once DataNodes have reported",
            )
        if kind in _PASSING:
            return one(StoreUnavailable, says)
        if "could only be written to" in says or kind == "NotEnoughReplicasException":
            return one(
                StoreUnavailable,
                "no DataNode takes the data",
                "`hdfs dfsadmin -report` shows which are alive, and their free space",
            )
        if kind:
            return one(StoreError, f"{kind}: {says}")
        if "No NameNode hosts found" in says:
            return one(
                StoreError,
                "its host has no port, and the configuration has no file system of that name",
                "write hdfs://HOST:8020/…, or set HADOOP_CONF_DIR to the directory of hdfs-site.xml",
            )
        if "DataTransferError" in text or "DataNode" in text:
            return one(
                StoreUnavailable,
                "no DataNode gives or takes the data",
                "`hdfs dfsadmin -report` shows which are alive",
            )
        if isinstance(error, OSError):
            return one(
                StoreUnavailable,
                f"the NameNode or a DataNode does not answer ({says})",
                "check host and port, and HADOOP_CONF_DIR: `hdfs getconf -confKey fs.defaultFS` shows the usual one, "
                "`hdfs dfsadmin -report` which DataNodes are alive",
            )
        return one(StoreError, says)


class HdfsReader(BaseReader):
    """Reads ranges of a file, whose blocks were looked up when it was opened."""

    def __init__(self, store: HdfsStore, name: str, reader: FileReader) -> None:
        super().__init__(name, len(reader))
        self._store = store
        self._reader: Any = reader

    def fetch(self, offset: int, buffer: memoryview) -> None:
        self._store.fetch(self.name, self._reader, offset, buffer)


class _NotEmpty(StoreError):
    """A directory that was to be removed has something in it."""


class _NoAnswer(StoreUnavailable):
    """A call that may still be carried out."""


_JAVA: Final = re.compile(r'RPCError\("(?:[\w$]+\.)*([\w$]+)", "(.*)', re.DOTALL)
_DENIED: Final = frozenset({"AccessControlException", "AuthorizationException", "SaslException", "InvalidToken"})
_KERBEROS: Final = re.compile(r"GSSAPI|SASL|Kerberos", re.IGNORECASE)
_FULL: Final = frozenset(
    {"DSQuotaExceededException", "NSQuotaExceededException", "QuotaByStorageTypeExceededException"}
)
_PASSING: Final = frozenset(
    {"NotReplicatedYetException", "StandbyException", "RetriableException", "LeaseExpiredException",
     "AlreadyBeingCreatedException", "ServerTooBusyException"}
)  # fmt: skip
