"""Who a process is, and whether it lives, as the operating system tells it: with /proc and without."""

from __future__ import annotations

import errno
import getpass
import os
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tenuto.concurrency import process
from tenuto.concurrency.process import judge, this_process


@pytest.fixture(autouse=True)
def read_anew() -> Iterator[None]:
    """What is known of this process is read within each test, and forgotten behind it."""
    process._own.clear()
    yield
    process._own.clear()


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_this_process_says_what_the_system_says() -> None:
    me = this_process()
    assert me.pid == os.getpid()
    assert me.host == socket.gethostname()
    assert me.boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert me.pid_namespace == os.readlink("/proc/self/ns/pid")
    assert me.user == getpass.getuser()
    ticks = int(me.started) / os.sysconf("SC_CLK_TCK")
    assert abs(psutil.boot_time() + ticks - psutil.Process().create_time()) < 2


@linux
def test_a_forked_child_asks_for_itself_even_under_a_pid_that_its_parent_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    me = this_process()
    assert this_process() is me
    monkeypatch.setattr(os, "getpid", lambda: me.pid)  # as if the child had the pid of somebody long dead
    child = os.fork()
    if child == 0:
        os._exit(0 if process._own == {} else 1)
    assert os.waitpid(child, 0)[1] == 0


def stat_line(name: str, state: str) -> str:
    """As proc(5) has it: pid, name in brackets, state, then numbers; the 22nd field is the start time."""
    return " ".join(["77", f"({name})", state, *(str(number) for number in range(4, 22)), "123456", "23", "24"]) + "\n"


@linux
@pytest.mark.parametrize("name", ["python", "a b", "x) Z 1 (y", "((", "é\udcff"])
@pytest.mark.parametrize(("state", "zombie"), [("R", False), ("S", False), ("Z", True), ("X", True), ("x", True)])
def test_a_program_may_have_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, state: str, zombie: bool
) -> None:
    (tmp_path / "77").write_bytes(stat_line(name, state).encode("utf-8", "surrogateescape"))
    monkeypatch.setattr(process, "_STAT", f"{tmp_path}/{{pid}}")
    assert process._inspect(77) == process._Process(started="123456", zombie=zombie)
    assert process._inspect(78) is None


@linux
@pytest.mark.parametrize(
    "error", [ProcessLookupError(), PermissionError(), OSError(errno.EMFILE, "too many open files")]
)
def test_a_process_that_ends_or_hides_while_it_is_looked_at_is_not_seen(
    monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    me = this_process()

    def refuse(path: Path, *arguments: object) -> str:
        if path == Path(f"/proc/{me.pid}/stat"):
            raise error
        return original(path, *arguments)  # type: ignore[arg-type]

    original = Path.read_text
    monkeypatch.setattr(Path, "read_text", refuse)
    assert process._inspect(os.getpid()) is None
    process._own.clear()
    assert judge(me) == "unknown", "it answers, and may be another one"


@linux
def test_where_proc_is_that_of_another_namespace_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `unshare --pid --fork`: what has our pid in that /proc is another process, and may end."""
    me, original = this_process(), os.readlink
    process._own.clear()
    monkeypatch.setattr(os, "readlink", lambda path: "4711" if path == "/proc/self" else original(path))
    assert this_process().pid_namespace == ""
    assert judge(me) == judge(this_process()) == "unknown"


@linux
def test_start_times_of_another_time_namespace_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    me, original = this_process(), os.readlink
    process._own.clear()
    monkeypatch.setattr(os, "readlink", lambda path: "time:[7]" if path == "/proc/self/ns/time" else original(path))
    there = this_process()
    assert there.pid_namespace == f"{me.pid_namespace} time:[7]" and judge(there) == "alive"
    assert judge(replace(me, started="1")) == "unknown", "it may have started at the same time"


@pytest.mark.parametrize("pid", [0, -1, -os.getpid()], ids=["zero", "minus one", "minus our own"])
def test_no_process_has_a_number_below_one(pid: int) -> None:
    """Signals to such numbers go to whole groups, so they must not even be asked."""
    assert process._inspect(pid) is None
    assert not process._answers(pid)
    assert judge(replace(this_process(), pid=pid)) == "dead"


def test_signal_zero_tells_whether_a_pid_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def kill(pid: int, number: int) -> None:
        asked.append((pid, number))
        if pid == 1:
            raise PermissionError
        if pid == 2:
            raise ProcessLookupError

    monkeypatch.setattr(os, "kill", kill)
    assert [process._answers(pid) for pid in (1, 2, 3, 2**31 - 1)] == [True, False, True, True]
    assert asked == [(1, 0), (2, 0), (3, 0), (2**31 - 1, 0)]
    assert not process._answers(2**31)
    assert len(asked) == 4


def test_where_the_system_does_not_say_who_somebody_is_nobody_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    me = this_process()

    def refuse(*arguments: object) -> str:
        raise OSError("hidden")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refuse)
        assert process._boot() == ""
    process._own.clear()
    with monkeypatch.context() as patch:
        patch.setattr(os, "readlink", refuse)
        assert process._pid_namespace() == ""
        assert judge(this_process()) == "unknown"
    monkeypatch.setattr(process, "_inspect", lambda pid: None)
    assert this_process().started == ""
    assert judge(replace(me, pid_namespace="")) == "unknown"


def test_a_user_without_a_name_goes_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr(getpass, "getuser", refuse)
    assert this_process().user == str(os.getuid())


def test_without_proc_a_process_is_told_by_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_LINUX", False)
    me = this_process()
    assert me.boot == repr(psutil.boot_time())
    assert me.pid_namespace == "host"
    assert me.started == repr(psutil.Process().create_time())
    assert judge(me) == "alive"
    assert judge(replace(me, started="1")) == "dead"
    assert judge(replace(me, boot="another")) == "unknown"

    pid = os.fork()
    if pid == 0:
        signal.pause()
    child = replace(me, pid=pid, started=repr(psutil.Process(pid).create_time()))
    assert judge(child) == "alive"
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert judge(child) == "dead", "nobody has reaped it"
    os.waitpid(pid, 0)
    assert judge(child) == "dead"


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (psutil.ZombieProcess(5), process._Process("", zombie=True)),
        (psutil.NoSuchProcess(5), None),
        (psutil.AccessDenied(5), None),
    ],
    ids=["zombie", "gone", "hidden"],
)
def test_what_psutil_will_not_say(
    monkeypatch: pytest.MonkeyPatch, error: Exception, found: process._Process | None
) -> None:
    def refuse(pid: int) -> psutil.Process:
        raise error

    monkeypatch.setattr(process, "_LINUX", False)
    monkeypatch.setattr(psutil, "Process", refuse)
    assert process._inspect(5) == found
